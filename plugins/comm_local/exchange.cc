#include "exchange.h"

#include <algorithm>
#include <chrono>

namespace comm_local {
namespace {

// From this many bytes written by one rank on, outputs go past the caches (see rank_sum.h).
constexpr uint64_t kStreamBytes = 4u << 20;

}  // namespace

Exchange::Exchange(Board* board, Memory* memory, const strata_host* host, Isa isa)
    : board_(board),
      memory_(memory),
      executor_(strata::plugin_kit::host_interface<strata_executor_api>(host, STRATA_HOST_EXECUTOR)),
      executor_ctx_(host->ctx),
      isa_(isa),
      rank_(board->rank()),
      world_(board->world()),
      call_(board->rank(), board->world()) {}

// ---- the course of a call ----

Error Exchange::run(Op op, const strata_coll_args& args, const Deadline& deadline) {
  if (Error e = board_->failure(); !e.ok()) return e;
  if (Error e = prepare(op, args); !e.ok()) {
    // The others could not know why we do not come.
    return board_->fail(e, {STRATA_FAILED_PRECONDITION, board_->who(rank_) + " gave up: " + e.text()});
  }
  const auto came = std::chrono::steady_clock::now();
  if (Error e = board_->sync(call_.what, deadline); !e.ok()) return e;
  if (STRATA_HAS(&args, strata_coll_args, waited_ns) && args.waited_ns) {
    *args.waited_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - came).count();
  }
  if (Error e = compare(); !e.ok()) return board_->fail(e);
  if (op == Op::kBarrier) return {};
  if (Error e = find_sources(); !e.ok()) return board_->fail(e);
  if (Error e = move(deadline); !e.ok()) return e;
  return board_->sync(call_.what, deadline);
}

// ---- checking and posting ----

Error Exchange::prepare(Op op, const strata_coll_args& args) {
  if (Error e = call_.read(board_->mine().calls.fetch_add(1) + 1, op, args); !e.ok()) return e;
  for (size_t k = 0; k < call_.items.size() && call_.reads_input_of(rank_); ++k) {
    const Item& item = call_.items[k];
    Place ignored;
    if (item.count > 0 && !memory_->find(item.in, call_.in_bytes(item), &ignored)) {
      return call_.bad_item(k, "its input is not in memory of this collective; allocate it through the collective");
    }
  }
  return post(args);
}

// Makes *base at least `bytes` of memory others can read.
Error Exchange::ensure_shared(uint64_t bytes, void** base, uint64_t* have) {
  if (bytes <= *have) return {};
  const uint64_t size = std::max(bytes, *have * 2);
  void* fresh = nullptr;
  if (Error e = memory_->alloc(size, &fresh); !e.ok()) return {e.code(), call_.what + ": " + e.text()};
  if (*base) {
    (void)memory_->free(*base, false);  // nobody reads it: every rank has left the last call
    board_->mine().frees.fetch_add(1);
  }
  *base = fresh;
  *have = size;
  return {};
}

Error Exchange::post(const strata_coll_args& args) {
  Post& own = board_->mine().posts[call_.number % 2];
  own = Post();
  const size_t items = call_.items.size();
  if (Error e = ensure_shared(items * sizeof(Posted), &table_, &table_bytes_); !e.ok()) return e;
  auto* table = static_cast<Posted*>(table_);
  uint64_t written = 0;
  for (size_t k = 0; k < items; ++k) {
    const Item& item = call_.items[k];
    table[k] = {{item.count, item.in_dtype, item.out_dtype}, {}};
    if (item.count > 0 && call_.reads_input_of(rank_)) {
      (void)memory_->find(item.in, call_.in_bytes(item), &table[k].in);
    }
    written += call_.out_bytes(item);
  }
  if (items > 0) (void)memory_->find(table_, table_bytes_, &own.table);
  if (call_.op == Op::kAllReduce && world_ > 1) {
    if (Error e = ensure_shared(kScratchBytes, &scratch_, &scratch_bytes_); !e.ok()) return e;
    (void)memory_->find(scratch_, scratch_bytes_, &own.scratch);
  }
  stream_ = written >= kStreamBytes;
  call_.describe(args, &own);
  return {};
}

Error Exchange::compare() {
  for (int r = 0; r < world_; ++r) memory_->refresh(r, board_->seat(r).frees.load());
  const Post& first = post_of(0);
  for (int r = 1; r < world_; ++r) {
    if (!same(first, post_of(r))) return {STRATA_FAILED_PRECONDITION, difference(first, 0, post_of(r), r)};
  }
  return {};
}

std::string Exchange::difference(const Post& a, int rank_a, const Post& b, int rank_b) {
  const std::string text = strata::collective_kit::difference(a, board_->number(rank_a), b, board_->number(rank_b));
  const char *table_a, *table_b;
  if (!differ_in_items(a, b) || !memory_->resolve(rank_a, a.table, &table_a).ok() ||
      !memory_->resolve(rank_b, b.table, &table_b).ok()) {
    return text;
  }
  for (uint64_t k = 0; k < a.items; ++k) {
    const std::string item = strata::collective_kit::difference(k, reinterpret_cast<const Posted*>(table_a)[k],
                                                                reinterpret_cast<const Posted*>(table_b)[k]);
    if (!item.empty()) return text + item;
  }
  return text;
}

// The address, in this process, of every input that this call reads.
Error Exchange::find_sources() {
  sources_.assign(static_cast<size_t>(world_) * call_.items.size(), nullptr);
  scratches_.assign(static_cast<size_t>(world_), nullptr);
  for (int r = 0; r < world_; ++r) {
    if (!call_.reads_input_of(r) || call_.items.empty()) continue;
    const char* table = nullptr;
    Error e = memory_->resolve(r, post_of(r).table, &table);
    for (size_t k = 0; k < call_.items.size() && e.ok(); ++k) {
      const Posted& posted = reinterpret_cast<const Posted*>(table)[k];
      if (r == rank_) {
        sources_[static_cast<size_t>(r) * call_.items.size() + k] = call_.items[k].in;
      } else if (posted.count > 0) {
        e = memory_->resolve(r, posted.in, &sources_[static_cast<size_t>(r) * call_.items.size() + k]);
      }
    }
    if (e.ok() && call_.op == Op::kAllReduce && world_ > 1) {
      e = memory_->resolve(r, post_of(r).scratch, &scratches_[static_cast<size_t>(r)]);
    }
    if (!e.ok()) return {e.code(), call_.what + ": " + e.text()};
  }
  return {};
}

}  // namespace comm_local
