// share.h - how much of the state that lies in host memory is updated on the device (split_update).
//
// Fixed by the manifest, or so that both sides end together: the share follows the rates of the last step, half way
// each time. It decides where numbers are computed and never which (contract 1), so ranks need not agree on it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace strata {

class UpdateShare {
 public:
  // `fixed` below 0: measured.
  explicit UpdateShare(double fixed) : measures_(fixed < 0), share_(fixed < 0 ? 0.3 : fixed) {}
  double share() const { return share_; }

  struct Side {
    uint64_t elements = 0;
    double seconds = 0;
    double rate() const { return seconds > 0 ? static_cast<double>(elements) / seconds : 0; }
  };
  // What the last step took. A side that had nothing to do says nothing.
  void measured(const Side& host, const Side& device) {
    if (!measures_ || host.rate() <= 0 || device.rate() <= 0) return;
    const double even = device.rate() / (host.rate() + device.rate());
    share_ = std::clamp((share_ + even) / 2, 0.02, 0.95);
  }

  // Cuts a step: whether its next part, of so many elements, is the device's. Parts of either side lie spread over it.
  class Spread {
   public:
    explicit Spread(double share) : share_(share) {}
    bool next(uint64_t elements) {
      const double part = static_cast<double>(elements);
      all_ += part;
      const bool device = chosen_ + part / 2 <= share_ * all_ && share_ > 0;
      if (device) chosen_ += part;
      return device;
    }

   private:
    const double share_;
    double all_ = 0, chosen_ = 0;
  };

 private:
  const bool measures_;
  double share_;
};

}  // namespace strata
