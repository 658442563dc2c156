#include "job_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "io/calls.h"
#include "plugin_kit/os_error.h"

namespace strata::offload_nvme {
namespace {

namespace fs = std::filesystem;
using io::calls;
using plugin_kit::join;
using plugin_kit::raise;
using plugin_kit::raise_errno;

constexpr char kPrefix[] = "strata-";
constexpr char kRecord[] = "owner";
constexpr size_t kJobLetters = 40;
constexpr int kMostNames = 10'000;

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream(path) >> line;
  return line;
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

std::string boot_id() { return first_line("/proc/sys/kernel/random/boot_id"); }

// When the process began, in ticks since boot; "" when there is none of this number.
std::string start_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return "";
  std::istringstream rest(text.substr(name_end + 1));
  std::string state, word;
  rest >> state;
  for (int field = 4; field <= 22; ++field) rest >> word;
  return state == "Z" || state == "X" ? "" : word;  // it has ended, only nobody has asked how
}

std::string record_of(const Owner& owner) {
  const std::string pid = std::to_string(::getpid());
  std::string job = owner.job;  // a line feed in it would begin a line that says who owns this
  std::replace_if(
      job.begin(), job.end(), [](unsigned char c) { return std::iscntrl(c); }, '_');
  return join("format strata.offload_nvme/1\nhost ", host_name(), "\nboot ", boot_id(), "\npid ", pid, "\nstart ",
              start_of(pid), "\nrank ", owner.rank, "\njob ", job, "\n");
}

std::map<std::string, std::string> read_record(const std::string& path) {
  std::map<std::string, std::string> record;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t space = line.find(' ');
    if (space != std::string::npos) record[line.substr(0, space)] = line.substr(space + 1);
  }
  return record;
}

// "job-", of letters that any file system takes, not too many of them; "" where the job has no name.
std::string plain(const std::string& job) {
  if (job.empty()) return "";
  std::string name = job.substr(0, kJobLetters) + "-";
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c) && c != '_' && c != '.' && c != '-'; },
      '_');
  return name;
}

bool is_ours(const std::string& name) { return name == kRecord || name == kProbe || name.rfind("segment-", 0) == 0; }

// 0 or an errno. `bytes`: what it took, added.
int remove_file(const std::string& file, Patience& patience, uint64_t* bytes) {
  const auto size = std::make_shared<uint64_t>(0);
  const int error = patience.ask("unlink of " + file, [file, size] {
    struct stat s {};
    if (::stat(file.c_str(), &s) == 0) *size = static_cast<uint64_t>(s.st_size);
    return calls().unlink(file.c_str()) == 0 ? 0 : errno;
  });
  if (!error) *bytes += *size;
  return error;
}

// 0 or an errno.
int list(const std::string& path, Patience& patience, std::vector<std::string>* names) {
  const auto found = std::make_shared<std::vector<std::string>>();
  const int error = patience.ask("listing of " + path, [path, found] {
    std::error_code failure;
    for (fs::directory_iterator entry(path, failure), end; !failure && entry != end; entry.increment(failure)) {
      found->push_back(entry->path().filename());
    }
    return failure.value();
  });
  if (!error) *names = *found;
  return error;
}

// Empty when all is gone, else what was in the way.
std::string remove_directory(const std::string& path, Patience& patience, uint64_t* bytes) {
  std::vector<std::string> names;
  if (const int error = list(path, patience, &names)) return "list it: " + patience.text_of(error);
  for (const std::string& name : names) {
    if (!is_ours(name)) return "it holds \"" + name + "\", which is not a file of this plugin";
    if (name == kRecord) continue;
    if (const int error = remove_file(path + "/" + name, patience, bytes)) {
      return "remove " + name + ": " + patience.text_of(error);
    }
  }
  // The record goes last: a process that is killed here leaves something that can be reclaimed.
  int error = remove_file(path + "/" + kRecord, patience);
  if (!error || error == ENOENT) {
    error = patience.ask("rmdir of " + path, [path] { return calls().rmdir(path.c_str()) == 0 ? 0 : errno; });
  }
  return error ? patience.text_of(error) : "";
}

bool lives(const std::map<std::string, std::string>& record) {
  const auto value = [&](const char* key) {
    const auto found = record.find(key);
    return found == record.end() ? std::string() : found->second;
  };
  if (record.empty()) return false;  // its maker died before the first line
  if (value("host") != host_name()) return true;
  return value("boot") == boot_id() && !value("start").empty() && start_of(value("pid")) == value("start");
}

void reclaim_one(const std::string& path, Patience& patience, const LogFn& log) {
  std::shared_ptr<io::Fd> record;
  if (const int error = patience.open(path + "/" + kRecord, O_RDONLY | O_NOFOLLOW, &record)) {
    if (error == ENOENT) ::rmdir(path.c_str());  // only an empty one goes
    return;
  }
  if (calls().flock(record->get(), LOCK_EX | LOCK_NB) != 0) return;
  auto owner = read_record(path + "/" + kRecord);
  if (lives(owner)) return;
  uint64_t bytes = 0;
  const std::string why = remove_directory(path, patience, &bytes);
  const std::string whose =
      join(path, ", left by job \"", owner["job"], "\", rank ", owner["rank"], ", process ", owner["pid"]);
  log(why.empty() ? STRATA_LOG_INFO : STRATA_LOG_WARN,
      why.empty() ? join("reclaimed ", bytes, " bytes: ", whose) : join("cannot reclaim ", whose, ": ", why));
}

std::vector<std::string> job_directories(const std::string& parent) {
  std::error_code error;
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    const std::string name = entry.path().filename();
    if (name.rfind(kPrefix, 0) == 0 && fs::symlink_status(entry.path(), error).type() == fs::file_type::directory) {
      found.push_back(entry.path());
    }
  }
  return found;
}

std::string make_directory(const std::string& parent, const Owner& owner, Patience& patience) {
  for (int n = 0; n < kMostNames; ++n) {
    const std::string path = join(parent, "/", kPrefix, plain(owner.job), "r", owner.rank, "-", ::getpid(), "-", n);
    const int error =
        patience.ask("mkdir of " + path, [path] { return calls().mkdir(path.c_str(), 0700) == 0 ? 0 : errno; });
    if (!error) return path;
    if (error != EEXIST) patience.raise(error, "make", path);
  }
  raise(STRATA_RESOURCE_EXHAUSTED, parent, ": ", kMostNames, " directories of this process");
}

// The record of a directory, locked. 0 or an errno.
int write_record(const std::string& file, const std::string& text, Patience& patience, std::shared_ptr<io::Fd>* out) {
  const auto fd = std::make_shared<io::Fd>();
  const int error = patience.ask("making of " + file, [file, text, fd] {
    *fd = io::Fd(calls().open(file.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
    if (!*fd || calls().flock(fd->get(), LOCK_EX | LOCK_NB) != 0) return errno;
    ssize_t n;
    while ((n = calls().pwrite(fd->get(), text.data(), text.size(), 0)) < 0 && errno == EINTR) {
    }
    if (n < 0) return errno;
    return n == static_cast<ssize_t>(text.size()) ? 0 : EIO;
  });
  if (!error) *out = fd;
  return error;
}

}  // namespace

int remove_file(const std::string& file, Patience& patience) {
  uint64_t bytes = 0;
  return remove_file(file, patience, &bytes);
}

std::shared_ptr<io::Fd> hold(const std::string& parent, Patience& patience) {
  const plugin_kit::Deadline deadline = patience.deadline();
  std::shared_ptr<io::Fd> directory;
  const int error = patience.open(parent, O_RDONLY | O_DIRECTORY, &directory);
  if (error == ENOENT) {
    raise(STRATA_NOT_FOUND, "nvme_path ", parent, ": No such file or directory; it has to be there, and is not made");
  }
  if (error) patience.raise(error, "nvme_path", parent);
  while (calls().flock(directory->get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) raise_errno(errno, "lock nvme_path", parent);
    if (deadline.passed()) {
      raise(STRATA_DEADLINE_EXCEEDED, "lock nvme_path ", parent, ": another process holds it for ", deadline.text());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return directory;
}

uint64_t bytes_of_probes(const std::string& parent) {
  uint64_t bytes = 0;
  for (const std::string& path : job_directories(parent)) {
    struct stat s {};
    if (::stat((path + "/" + kProbe).c_str(), &s) == 0) bytes += static_cast<uint64_t>(s.st_blocks) * 512;
  }
  return bytes;
}

JobDir::JobDir(const std::string& parent, const Owner& owner, Patience& patience, LogFn log)
    : patience_(patience), log_(std::move(log)) {
  const auto held = hold(parent, patience_);
  for (const std::string& path : job_directories(parent)) reclaim_one(path, patience_, log_);
  path_ = make_directory(parent, owner, patience_);
  const std::string file = path_ + "/" + kRecord;
  const int error = write_record(file, record_of(owner), patience_, &record_);
  if (!error) return;
  uint64_t bytes = 0;
  (void)remove_directory(path_, patience_, &bytes);
  patience_.raise(error, "write", file);
}

JobDir::~JobDir() {
  uint64_t bytes = 0;
  const std::string why = remove_directory(path_, patience_, &bytes);
  (void)patience_.ask("close of " + path_ + "/" + kRecord, [record = std::move(record_)] { return 0; });
  if (!why.empty()) log_(STRATA_LOG_WARN, path_ + " could not be removed: " + why);
}

}  // namespace strata::offload_nvme
