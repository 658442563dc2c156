// processes.cc - forked ranks and what they say; see ranks.h.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "ranks.h"

namespace strata::test {

std::string fresh_job() {
  static std::atomic<int> number{0};
  return "test." + std::to_string(getpid()) + "." + std::to_string(++number);
}

Processes::~Processes() {
  for (size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i].reaped) {
      signal(static_cast<int>(i), SIGKILL);
      reap(static_cast<int>(i));
    }
    ::close(children_[i].pipe);
  }
}

int Processes::start(const Body& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (Child& other : children_) ::close(other.pipe);
    children_.clear();
    ::close(ends[0]);
    out_ = ends[1];
    std::string result;
    try {
      result = body(*this);
    } catch (const std::exception& e) {
      result = e.what();
    }
    say(result);
    ::_exit(0);
  }
  ::close(ends[1]);
  children_.push_back({pid, ends[0], "", false});
  return static_cast<int>(children_.size()) - 1;
}

void Processes::say(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(out_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(3);
}

std::string Processes::line(int index) {
  Child& child = children_[static_cast<size_t>(index)];
  for (;;) {
    if (const size_t end = child.buffer.find('\n'); end != std::string::npos) {
      const std::string line = child.buffer.substr(0, end);
      child.buffer.erase(0, end + 1);
      return line;
    }
    pollfd one = {child.pipe, POLLIN, 0};
    if (::poll(&one, 1, 30'000) <= 0) return "<nothing in 30 s>";
    char bytes[4096];
    const ssize_t got = ::read(child.pipe, bytes, sizeof(bytes));
    if (got <= 0) return "<ended>";
    child.buffer.append(bytes, static_cast<size_t>(got));
  }
}

void Processes::signal(int index, int number) { ::kill(children_[static_cast<size_t>(index)].pid, number); }

void Processes::reap(int index) {
  Child& child = children_[static_cast<size_t>(index)];
  if (!child.reaped) ::waitpid(child.pid, nullptr, 0);
  child.reaped = true;
}

}  // namespace strata::test
