// part_update.h - the optimizer's call for one part of a step: spans with their scalars, and where everything lies.
#pragma once

#include <chrono>
#include <map>
#include <utility>
#include <vector>

#include "core/trace.h"
#include "core/update/job.h"

namespace strata {

class PartUpdate {
 public:
  PartUpdate(const Layout& layout, const Device& device, const Gradients& gradients, const States& states,
             Counters& counters)
      : layout_(layout), device_(device), gradients_(gradients), states_(states), counters_(counters) {}
  uint64_t bytes() const { return 2 * sizeof(Factors); }
  Status allocate();

  // What follows belongs to `job`. `steps`: updates applied so far to each registered unit. Update thread; the rest is
  // for both lanes at once.
  Status begin(const UpdateJob& job, const std::vector<uint64_t>& steps);
  // `buffer` and `grad` as States::point wants the first, and where the part's gradient lies. On `stream`, or done on
  // return where the part's update runs on the host.
  Status run(const States::Piece& piece, char* buffer, const char* grad, const strata_stream* stream) const;

  // New weights of the unit at `position` may be written, by work on `writer` or (NULL) by the calling thread.
  Status wait_for_readers(size_t position, const strata_stream* writer, std::chrono::nanoseconds deadline,
                          TraceRow& row) const;
  // Whether all of the piece is updated: not where it holds params of a registered unit that nobody used.
  bool updates_all(const States::Piece& piece) const;
  // Where a part's reduced gradient lies, and what it takes.
  const char* gradient(const States::Piece& piece) const;
  uint64_t gradient_bytes(const States::Piece& piece) const { return piece.count * dtype_size(dtype(piece)); }

 private:
  strata_dtype dtype(const States::Piece& piece) const {
    return gradients_.owned_dtype(layout_.units[piece.unit].segments[piece.segment]);
  }

  const Layout& layout_;
  const Device& device_;
  const Gradients& gradients_;
  const States& states_;
  Counters& counters_;
  const UpdateJob* job_ = nullptr;
  // What an update reads where it runs. Two sets: a step's norm is known only after the update two steps back is done.
  struct Factors {
    float grad_scale;
    uint32_t apply;
  };
  Memory factors_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> scalar_sets_;  // (group, unit) -> index, of the job
  std::vector<float> scalars_;
};

}  // namespace strata
