#include "tests/train_kill/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace strata::test {
namespace {

namespace fs = std::filesystem;

constexpr int kRuns = INT32_MIN, kStuck = 1000;

// What can be read of a file; a process may end meanwhile.
std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::string link_of(const fs::path& path) {
  std::error_code error;
  return fs::read_symlink(path, error).string();
}

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

// The number behind a word of the kernel's description of a ring.
int64_t number_behind(const std::string& text, const std::string& word) {
  const size_t at = text.find("\n" + word + ":");
  return at == std::string::npos ? 0 : std::atoll(text.c_str() + at + word.size() + 2);
}

}  // namespace

Ranks::Ranks(const Start& start) : start_(start) {
  static std::atomic<int> serial{0};
  const std::string job = "kill-" + std::to_string(::getpid()) + "-" + std::to_string(serial++);
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> words = {STRATA_TRAIN_ON_DISK,
                                      std::to_string(static_cast<int>(start.what)),
                                      start.nvme_path,
                                      start.checkpoints,
                                      std::to_string(start.steps),
                                      start.out,
                                      start.tag};
    std::vector<std::string> variables = {"STRATA_JOB=" + job, "STRATA_RANK=" + std::to_string(rank),
                                          "STRATA_WORLD_SIZE=2"};
    std::vector<char*> argv = pointers_to(words), env = pointers_to(variables);
    const std::string output = start.out + "." + std::to_string(rank);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    pid_t pid = 0;
    const int error = ::posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), env.data());
    ::posix_spawn_file_actions_destroy(&actions);
    if (error) ADD_FAILURE() << argv[0] << ": " << std::strerror(error);
    pids_.push_back(pid);
    codes_.push_back(error ? 127 : kRuns);
  }
}

Ranks::~Ranks() {
  kill({0, 1});
  (void)wait();
}

void Ranks::kill(const std::vector<int>& ranks) {
  for (int rank : ranks) {
    if (codes_[static_cast<size_t>(rank)] == kRuns) ::kill(pids_[static_cast<size_t>(rank)], SIGKILL);
  }
}

bool Ranks::all_ended() {
  for (size_t rank = 0; rank < pids_.size(); ++rank) {
    int status = 0;
    if (codes_[rank] != kRuns || ::waitpid(pids_[rank], &status, WNOHANG) <= 0) continue;
    codes_[rank] = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }
  return std::count(codes_.begin(), codes_.end(), kRuns) == 0;
}

std::vector<int> Ranks::wait(std::chrono::seconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!all_ended() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (size_t rank = 0; rank < pids_.size(); ++rank) {
    if (codes_[rank] != kRuns) continue;
    ::kill(pids_[rank], SIGKILL);
    ::waitpid(pids_[rank], nullptr, 0);
    codes_[rank] = kStuck;
  }
  return codes_;
}

std::string Ranks::output(int rank) const { return text_of(start_.out + "." + std::to_string(rank)); }

int Ranks::lines(int rank) const {
  const std::string text = output(rank);
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

std::string Ranks::last_line(int rank) const {
  std::istringstream lines(output(rank));
  std::string last = "start", line;
  while (std::getline(lines, line)) last = line;
  return last;
}

bool Ranks::has_transfers_in_flight(int rank) const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(proc(rank) + "fd", error)) {
    if (link_of(entry.path()).find("[io_uring]") == std::string::npos) continue;
    const std::string text = "\n" + text_of(proc(rank) + "fdinfo/" + entry.path().filename().string());
    // One is always there: the read that wakes the thread of the ring.
    if (number_behind(text, "CachedSqHead") - number_behind(text, "CachedCqTail") > 1) return true;
  }
  return false;
}

bool Ranks::is_inside_a_write(int rank) const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(proc(rank) + "task", error)) {
    std::istringstream text(text_of(entry.path() / "syscall"));
    long number = -1;
    uint64_t fd = 0;
    if (!(text >> number >> std::hex >> fd) || number != SYS_pwrite64) continue;
    if (link_of(proc(rank) + "fd/" + std::to_string(fd)).find("/segment-") != std::string::npos) return true;
  }
  return false;
}

}  // namespace strata::test
