// fetch_order.h - the order in which the host fetched units in the last step, and where this step stands in it.
//
// The order covers the whole step: forward, recompute, backward, and whatever else fetched. A fetch that is not the
// predicted one stops prediction until a later fetch agrees again. Depends on host calls only, so every rank predicts
// the same as long as every rank calls the same.
#pragma once

#include <cstdint>
#include <vector>

namespace strata {

class FetchOrder {
 public:
  // Records a fetch; afterwards `next(0)` is the predicted one after it.
  void fetched(uint32_t unit) {
    current_.push_back(unit);
    agrees_ = cursor_ < last_.size() && last_[cursor_] == unit;
    if (agrees_) {
      ++cursor_;
      return;
    }
    for (size_t i = cursor_; i < last_.size(); ++i) {
      if (last_[i] == unit) {
        cursor_ = i + 1;
        return;
      }
    }
  }

  // The k-th predicted fetch from here, or -1 when there is no prediction.
  int64_t next(size_t k) const {
    return agrees_ && cursor_ + k < last_.size() ? static_cast<int64_t>(last_[cursor_ + k]) : -1;
  }

  // The step is over: what was seen becomes the prediction.
  void end_step() {
    if (!current_.empty()) last_ = std::move(current_);
    current_.clear();
    cursor_ = 0;
    agrees_ = false;
  }

  const std::vector<uint32_t>& last() const { return last_; }

 private:
  std::vector<uint32_t> last_, current_;
  size_t cursor_ = 0;
  bool agrees_ = false;
};

}  // namespace strata
