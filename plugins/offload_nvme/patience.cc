#include "patience.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <system_error>
#include <thread>

#include "io/blocked_signals.h"
#include "io/calls.h"
#include "plugin_kit/os_error.h"

namespace strata::offload_nvme {
namespace {

struct Call {
  std::function<int()> make;
  std::promise<int> answer;

  void run() {
    const int error = make();
    make = nullptr;
    answer.set_value(error);
  }
};

}  // namespace

int Patience::ask(const std::string& what, std::function<int()> call) {
  if (is_over()) return ETIMEDOUT;
  const auto asked = std::make_shared<Call>();
  asked->make = std::move(call);
  std::future<int> answer = asked->answer.get_future();
  std::thread thread;
  try {
    const io::BlockedSignals blocked;
    thread = std::thread([asked] { asked->run(); });
  } catch (const std::system_error&) {  // no thread is to be had: then this one waits, however long that is
    asked->run();
    return answer.get();
  }
  if (answer.wait_until(deadline().point()) == std::future_status::ready) {
    thread.join();
    return answer.get();
  }
  thread.detach();
  std::lock_guard lock(mutex_);
  if (unanswered_.empty()) unanswered_ = what;
  return ETIMEDOUT;
}

int Patience::open(const std::string& path, int flags, std::shared_ptr<io::Fd>* out) {
  const auto fd = std::make_shared<io::Fd>();  // with a late answer it is closed again
  const int error = ask("open of " + path, [path, flags, fd] {
    *fd = io::Fd(io::calls().open(path.c_str(), flags | O_CLOEXEC, 0600));
    return *fd ? 0 : errno;
  });
  if (!error) *out = fd;
  return error;
}

bool Patience::is_over() const {
  std::lock_guard lock(mutex_);
  return !unanswered_.empty();
}

std::string Patience::text_of(int error) const {
  std::lock_guard lock(mutex_);
  if (error != ETIMEDOUT || unanswered_.empty()) return std::strerror(error);
  return unanswered_ + ": the disk did not answer within " + deadline().text();
}

void Patience::raise(int error, const std::string& what, const std::string& path) const {
  throw plugin_kit::Error(plugin_kit::status_of_errno(error), what + " " + path + ": " + text_of(error));
}

}  // namespace strata::offload_nvme
