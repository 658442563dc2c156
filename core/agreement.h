// agreement.h - what all ranks agree on once per step, in one small gather behind the last reduction.
//
// Each rank sends: its part of the squared norm, the hash of every collective it submitted so far, which units got a
// gradient, and the order in which units became ready. Everybody computes the same outcome from the same bytes: the
// norm (partials added in rank order), whether it is finite, the clip factor, the one fp32 factor of the optimizer,
// the units used anywhere, and rank 0's order as the next canonical one.
//
// All that is among the ranks of a data-parallel group. Where the world has several, they hold parts of one model: a
// second exchange, among everyone, adds up what each group found, so that all apply the step with one factor, or skip
// it.
#pragma once

#include <memory>
#include <vector>

#include "core/comm_queue.h"
#include "core/gradients/gradients.h"

namespace strata {

struct StepOutcome {
  Work known;           // ended by the collective thread; the rest is valid after it
  double norm = 0;      // of the mean gradient
  double max_norm = 0;  // 0 or inf: no clipping
  double clip = 1;
  float grad_scale = 0;  // clip / (world * micro-batches), rounded once
  uint32_t apply = 0;
  bool says_why = false;           // of the group's parts that are not finite this rank has the first
  bool any_used = false;           // a rank of this group handed over a gradient
  bool any_used_anywhere = false;  // false: no rank did, and the step changes nothing
  std::vector<uint8_t> used;       // by registered unit, on any rank
  std::vector<uint32_t> order;     // rank 0's
  // Counters when the step's last collective was done (collective thread) and when strata_step was called.
  strata_counters counted{}, host_counted{};
};

class Agreement {
 public:
  Agreement(const Registry& registry, const Layout& layout, CommQueue& queue, Gradients& gradients,
            const Counters& counters);
  // Submits the agreement of this step. Of its arguments, those behind the first hash must be equal in the group, those
  // behind the second everywhere. Host thread.
  std::shared_ptr<StepOutcome> submit(uint64_t step, double max_norm, uint64_t group_hash, uint64_t world_hash);

 private:
  struct Header {
    double norm_partial;
    uint64_t hash;
    uint32_t used_count, order_count;
  };
  Status fill(uint64_t hash, const std::vector<uint8_t>& used, const std::vector<uint32_t>& order);
  char* of_rank(int rank) { return &messages_[stride_ * (static_cast<uint64_t>(rank) + 1)]; }
  // What a data-parallel group brings to the second exchange.
  struct GroupPart {
    double squares;
    uint64_t any_used, hash;
  };
  Status conclude_group(StepOutcome& outcome);
  Status conclude(StepOutcome& outcome);
  Status decide(StepOutcome& outcome, double squares);

  const Registry& registry_;
  const Layout& layout_;
  CommQueue& queue_;
  Gradients& gradients_;
  const Counters& counters_;
  uint64_t stride_;             // bytes of one rank's message
  std::vector<char> messages_;  // mine, then everybody's
  GroupPart part_{};
  std::vector<GroupPart> parts_;  // by rank of the world
};

}  // namespace strata
