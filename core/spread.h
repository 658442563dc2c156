// spread.h - a share of many pieces, lying evenly over all of them in their order.
#pragma once

#include <cstdint>

namespace strata {

class Spread {
 public:
  explicit Spread(double share) : share_(share) {}
  // Whether the next piece, of so many elements, belongs to the share.
  bool next(uint64_t elements) {
    const double piece = static_cast<double>(elements);
    all_ += piece;
    const bool chosen = chosen_ + piece / 2 <= share_ * all_ && share_ > 0;
    if (chosen) chosen_ += piece;
    return chosen;
  }

 private:
  const double share_;
  double all_ = 0, chosen_ = 0;
};

}  // namespace strata
