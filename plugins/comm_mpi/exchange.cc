#include "exchange.h"

#include <algorithm>

#include "host_memory/host_memory.h"
#include "plugin_kit/plugin_kit.h"
#include "process.h"

namespace comm_mpi {
namespace {

// What the receive buffer of the sums has in all, and what a sender has of it at least.
constexpr uint64_t kBufferBytes = uint64_t{16} << 20;
constexpr uint64_t kLeastSlotBytes = uint64_t{64} << 10;

uint64_t slot_bytes(int world) {
  return std::max(kLeastSlotBytes, kBufferBytes / static_cast<uint64_t>(std::max(1, world - 1)) / 64 * 64);
}

}  // namespace

Exchange::Exchange(Channel* channel, MPI_Comm data, const strata_host* host)
    : channel_(channel),
      data_(data),
      executor_(strata::plugin_kit::host_interface<strata_executor_api>(host, STRATA_HOST_EXECUTOR)),
      executor_ctx_(host->ctx),
      rank_(channel->rank()),
      world_(channel->world()),
      isa_(strata::rank_sum::best_isa()),
      slot_bytes_(slot_bytes(channel->world())),
      call_(channel->rank(), channel->world()) {}

Exchange::~Exchange() { strata::host_memory::release(buffer_, slot_bytes_ * static_cast<uint64_t>(world_ - 1)); }

Error Exchange::run(Op op, const strata_coll_args& args, const Deadline& deadline) {
  if (Error e = channel_->failure(); !e.ok()) return e;
  if (Error e = call_.read(call_.number + 1, op, args); !e.ok()) {
    // The others could not know why we do not come.
    return channel_->fail(e, {STRATA_FAILED_PRECONDITION, channel_->who(rank_) + " gave up: " + e.text()});
  }
  Post post{};
  call_.describe(args, &post);
  if (Error e = channel_->meet(post, call_.what, deadline); !e.ok()) return e;
  in_flight_ = op != Op::kBarrier;
  if (Error e = move(deadline); !e.ok()) {
    Process::get().leave_unfinished();
    return channel_->fail(e);
  }
  in_flight_ = false;
  channel_->complete();
  return {};
}

}  // namespace comm_mpi
