#include "bench/nvme/limits.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

namespace strata::bench {

void die(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double loop_rate(const std::string& what, const std::string& file, char* memory) {
  const double begin = seconds_now();
  const int fd = ::open(file.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (fd < 0) die(file + ": " + std::strerror(errno));
  for (uint64_t at = 0; at < kBytes; at += kPiece) {
    const bool read = what == "read" || (what == "mixed" && at / kPiece % 2 == 0);
    const auto offset = static_cast<off_t>(at);
    const ssize_t n = read ? ::pread(fd, memory + at, kPiece, offset) : ::pwrite(fd, memory + at, kPiece, offset);
    if (n != static_cast<ssize_t>(kPiece)) die(file + ": " + std::strerror(errno));
  }
  ::close(fd);
  return static_cast<double>(kBytes) / (seconds_now() - begin);
}

double fio_rate(const std::string& what, const std::string& file) {
  const std::string rw = what == "mixed" ? "rw" : what;
  const std::string command =
      "fio --name=bench --filename=" + file + " --rw=" + rw + " --bs=1M --ioengine=io_uring --direct=1 --iodepth=32 " +
      "--size=" + std::to_string(kBytes) + " --overwrite=1 --fallocate=none --invalidate=0 --output-format=json";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t n; pipe && (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  if (!pipe || ::pclose(pipe) != 0) die("this failed: " + command);
  const auto job = nlohmann::json::parse(text.substr(text.find('{')))["jobs"][0];
  double bytes = 0, seconds = 0;
  for (const char* side : {"read", "write"}) {
    bytes += job[side]["io_bytes"].get<double>();
    seconds = std::max(seconds, job[side]["runtime"].get<double>() / 1e3);
  }
  return bytes / seconds;
}

namespace {
std::string make_folder(const std::string& parent) {
  std::string path = parent + "/bench-nvme-XXXXXX";
  if (!::mkdtemp(path.data())) die(path + ": " + std::strerror(errno));
  return path;
}

// A bench that fails ends by exit, which unwinds nothing.
std::set<std::string>& folders() {
  static std::set<std::string> open;
  return open;
}
void remove_folders() {
  for (const std::string& path : folders()) std::filesystem::remove_all(path);
}
}  // namespace

Folder::Folder(const std::string& parent) : path(make_folder(parent)) {
  if (folders().empty()) std::atexit(remove_folders);
  folders().insert(path);
}
Folder::~Folder() {
  std::filesystem::remove_all(path);
  folders().erase(path);
}

}  // namespace strata::bench
