// board.h - the requests of one queue: what waits, which pieces are on their way, and what became of them.
//
// Servers take pieces and hand back what the kernel said. Everything that does not depend on how a piece is moved is
// here: cutting, turns of reads and writes, short transfers, errors, the deadline.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "io/queue.h"

namespace strata::io {

class Board {
 public:
  explicit Board(const Queue::Options& options) : options_(options) {}

  // How many pieces may be on their way; before the first take.
  void set_slots(unsigned count);

  // True when a server sleeps and must be woken.
  bool submit(Request request);
  void wait_until_told();  // all whose requests were submitted
  void stop();
  // Ends everything with ETIMEDOUT when a piece is older than the deadline: nothing else ends a request with pieces on
  // their way.
  void expire();
  // Returns at stop; expires in between.
  void watch();
  // Ends everything, now and later, with this errno; a request with pieces on their way when they are back.
  void fail_all(int error);

  struct Piece {
    bool write;
    int fd, file;  // descriptor and slot of the QueueFile
    uint64_t offset, bytes;
    char* data;
  };
  // The next piece to move and the slot it is known by. take: false when there is none now. wait_take: false at stop.
  bool take(unsigned* slot, Piece* piece);
  bool wait_take(unsigned* slot, Piece* piece);
  // What the kernel answered: bytes, or a negative errno.
  void finish(unsigned slot, int64_t result);
  // Nothing will come any more, and nothing is on its way.
  bool is_over();
  std::chrono::nanoseconds busy();

 private:
  using Clock = std::chrono::steady_clock;
  struct Item {
    Request request;
    uint64_t taken = 0, moved = 0;
    unsigned out = 0;  // pieces taken and not back
    int error = 0;
    bool reported = false;
  };
  struct Slot {
    std::shared_ptr<Item> item;  // NULL: free
    uint64_t at = 0, bytes = 0;
    Clock::time_point since{};
    unsigned stalls = 0;
  };
  using Report = std::function<void()>;

  bool next(Slot* slot);
  bool take_locked(unsigned* slot, Piece* piece);
  bool is_idle() const { return free_.size() == slots_.size(); }  // no piece is on its way
  bool go_on(Slot* slot, int64_t result);
  void drop(const Item* item);
  Report report(Item* item, int error);
  void end_all(int error, bool at_once, std::unique_lock<std::mutex>& lock);
  void tell(const std::vector<Report>& reports, std::unique_lock<std::mutex>& lock);

  const Queue::Options options_;
  std::mutex mutex_;
  std::condition_variable wake_, told_, stopping_;
  std::deque<std::shared_ptr<Item>> lines_[2];  // with bytes not yet taken: reads, writes
  std::deque<Slot> again_;                      // the rest of pieces that came up short
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;
  Clock::time_point busy_since_{};  // with a piece on its way
  Clock::duration busy_{0};         // before that
  bool turn_ = false, sleeping_ = false, stop_ = false;
  int dead_ = 0;          // the errno with which everything ends
  unsigned untold_ = 0;   // requests that have not ended
  unsigned telling_ = 0;  // calls of `done` under way
};

// Moves the pieces of a board, on threads that run `serve`.
class Server {
 public:
  virtual ~Server() = default;
  virtual unsigned threads() const = 0;
  virtual void serve() = 0;               // returns when the board is over
  virtual bool wake() = 0;                // false: it cannot, and the board has ended everything
  virtual int attach(int) { return -1; }  // the slot of a QueueFile
  virtual void detach(int) {}
  virtual int register_memory(void* memory, uint64_t bytes);
  virtual void unregister_memory(void*) {}
};

// NULL when there can be no ring; `remark` says why, or how it differs from what was asked for.
std::shared_ptr<Server> make_ring_server(std::shared_ptr<Board> board, unsigned depth, std::string* remark);
std::shared_ptr<Server> make_thread_server(std::shared_ptr<Board> board, unsigned depth);

}  // namespace strata::io
