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
  bool measures() const { return measures_; }
  double share() const { return share_; }

  struct Side {
    uint64_t elements = 0;
    double seconds = 0;
    double rate() const { return seconds > 0 ? static_cast<double>(elements) / seconds : 0; }
  };
  // What the last step took. Of few parts a share near 0 or 1 leaves one side none, and that side says nothing: it goes
  // towards one half then, so that the side is heard again.
  void measured(const Side& host, const Side& device) {
    if (!measures_) return;
    const bool one_had_none = (host.elements == 0) != (device.elements == 0);
    if (!one_had_none && (host.rate() <= 0 || device.rate() <= 0)) return;
    const double even = one_had_none ? 0.5 : device.rate() / (host.rate() + device.rate());
    share_ = std::clamp((share_ + even) / 2, 0.02, 0.95);
  }

 private:
  const bool measures_;
  double share_;
};

}  // namespace strata
