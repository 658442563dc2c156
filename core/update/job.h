// job.h - one optimizer step as the update thread gets it, cut into parts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/agreement.h"
#include "core/states.h"

namespace strata {

struct UpdateJob {
  uint64_t step = 0;
  uint64_t traced = 0;                               // the same in the trace, 0 where it is not recorded
  bool ends_trace = false;                           // the last one that is
  std::function<void(const StepOutcome&)> on_known;  // may be empty
  std::shared_ptr<StepOutcome> outcome;
  std::vector<uint32_t> units;             // layout units with trainable segments, in forward order
  std::vector<Work> updated;               // one per entry of `units`
  std::vector<std::vector<Work>> after;    // what still reads each one's weights
  std::vector<strata_optim_group> groups;  // with this step's learning rates
};

// A sub-group, or a piece of one.
struct UpdatePart {
  States::Piece piece;
  size_t position;   // of the unit in job.units
  bool first, last;  // of that unit, on its side
};

// A lane is through with its parts of the unit at `position`, but for work that is done at `end`.
using UnitDoneFn = std::function<Status(size_t position, const Marker& end)>;

}  // namespace strata
