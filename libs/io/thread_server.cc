// A queue without io_uring: one thread per piece on its way.
#include <algorithm>
#include <cerrno>

#include "io/board.h"
#include "io/calls.h"

namespace strata::io {
namespace {

constexpr unsigned kMostThreads = 16;  // more gain nothing at the sizes of pieces

class ThreadServer : public Server {
 public:
  ThreadServer(std::shared_ptr<Board> board, unsigned depth)
      : board_(std::move(board)), threads_(std::clamp(depth, 1u, kMostThreads)) {
    board_->set_slots(threads_);
  }
  unsigned threads() const override { return threads_; }
  bool wake() override { return true; }

  void serve() override {
    unsigned slot;
    Board::Piece piece;
    while (board_->wait_take(&slot, &piece)) {
      const auto offset = static_cast<off_t>(piece.offset);
      const ssize_t moved = piece.write ? calls().pwrite(piece.fd, piece.data, piece.bytes, offset)
                                        : calls().pread(piece.fd, piece.data, piece.bytes, offset);
      board_->finish(slot, moved < 0 ? -errno : moved);
    }
  }

 private:
  const std::shared_ptr<Board> board_;
  const unsigned threads_;
};

}  // namespace

std::shared_ptr<Server> make_thread_server(std::shared_ptr<Board> board, unsigned depth) {
  return std::make_shared<ThreadServer>(std::move(board), depth);
}

}  // namespace strata::io
