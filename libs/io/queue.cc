#include "io/queue.h"

#include <cerrno>
#include <future>

#include "io/blocked_signals.h"
#include "io/board.h"

namespace strata::io {

int Server::register_memory(void*, uint64_t) { return ENOTSUP; }

Queue::Queue(const Options& options) : board_(std::make_shared<Board>(options)) {
  if (options.use_ring) server_ = make_ring_server(board_, options.depth, &remark_);
  uses_ring_ = server_ != nullptr;
  if (!server_) server_ = make_thread_server(board_, options.depth);
  const BlockedSignals blocked;
  threads_.emplace_back([board = board_] { board->watch(); });
  for (unsigned i = 0; i < server_->threads(); ++i) {
    threads_.emplace_back([server = server_] { server->serve(); });
  }
}

Queue::~Queue() {
  board_->wait_until_told();
  board_->stop();
  const bool all_back = server_->wake() && board_->is_over();
  for (std::thread& thread : threads_) all_back ? thread.join() : thread.detach();
}

void Queue::submit(Request request) {
  if (board_->submit(std::move(request))) (void)server_->wake();
}

int Queue::transfer(Request request) {
  std::promise<int> ended;
  request.done = [&ended](int error, uint64_t) { ended.set_value(error); };
  submit(std::move(request));
  return ended.get_future().get();
}

void Queue::drain() { board_->wait_until_told(); }
std::chrono::nanoseconds Queue::busy() const { return board_->busy(); }

QueueFile Queue::attach(std::shared_ptr<const Fd> fd) {
  const int slot = server_->attach(fd->get());
  return {std::move(fd), slot};
}
void Queue::detach(const QueueFile& file) { server_->detach(file.slot); }
int Queue::register_memory(void* memory, uint64_t bytes) { return server_->register_memory(memory, bytes); }
void Queue::unregister_memory(void* memory) { server_->unregister_memory(memory); }

}  // namespace strata::io
