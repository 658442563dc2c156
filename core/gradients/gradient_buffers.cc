#include "core/gradients/gradient_buffers.h"

#include <algorithm>
#include <numeric>

namespace strata {

void GradientBuffers::plan(std::vector<uint64_t> sizes, Room room) {
  room_ = room;
  sizes_ = std::move(sizes);
  places_.assign(sizes_.size(), std::nullopt);
  own_place_.resize(sizes_.size());
  std::exclusive_scan(sizes_.begin(), sizes_.end(), own_place_.begin(), uint64_t{0});
  if (std::reduce(sizes_.begin(), sizes_.end()) > room.buffers) own_place_.clear();
}

Status GradientBuffers::allocate(const Collective& collective, char** base) {
  STRATA_RETURN_IF_ERROR(
      Memory::for_collectives(collective, room_.buffers + room_.zeros, &memory_).during("gradient buffers"));
  *base = memory_.at(0);
  return Ok();
}

void GradientBuffers::place(char* base) {
  base_ = base;
  arena_ = Arena(room_.buffers);
  in_flight_.clear();
  reclaimed_ = {};
}

Status GradientBuffers::open(uint32_t unit, const std::function<Status()>& settle) {
  auto place = find_place(unit);
  while (!place && !in_flight_.empty()) {
    STRATA_RETURN_IF_ERROR(reclaim_oldest());
    place = find_place(unit);
  }
  if (!place) {
    STRATA_RETURN_IF_ERROR(settle());
    STRATA_RETURN_IF_ERROR(before(nullptr));
    STRATA_RETURN_IF_ERROR(move_together());
    place = find_place(unit);
  }
  if (!place) {
    return {STRATA_RESOURCE_EXHAUSTED, std::to_string(sizes_[unit]) + " bytes find no room among unreduced gradients"};
  }
  places_[unit] = place;
  return Ok();
}

std::optional<uint64_t> GradientBuffers::find_place(uint32_t unit) {
  if (own_place_.empty()) return arena_.take(sizes_[unit]);
  for (const InFlight& flight : in_flight_) {
    for (const auto& [other, offset] : flight.places) {
      if (other == unit) return std::nullopt;
    }
  }
  return own_place_[unit];
}

Status GradientBuffers::before(const strata_stream* stream) const {
  return reclaimed_ ? reclaimed_.before(stream, queue_.patience()) : Ok();
}

void GradientBuffers::hand_over(const std::vector<uint32_t>& units, Work reduced) {
  InFlight flight;
  flight.reduced = std::move(reduced);
  for (uint32_t unit : units) {
    if (places_[unit]) flight.places.emplace_back(unit, *places_[unit]);
    places_[unit].reset();
  }
  if (!flight.places.empty()) in_flight_.push_back(std::move(flight));
}

Status GradientBuffers::reclaim_oldest() {
  const InFlight flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  const Span wait(trace_.host, "wait for reduction", kNoUnit, nullptr, !flight.reduced.is_set());
  STRATA_RETURN_IF_ERROR(flight.reduced.wait_enqueued(queue_.patience()));
  reclaimed_ = flight.reduced;
  for (const auto& [unit, offset] : flight.places) {
    if (own_place_.empty()) arena_.give(offset, sizes_[unit]);
  }
  return Ok();
}

// No reduction reads, and nothing writes: what is left are buffers being filled, and they slide to the start, lowest
// first.
Status GradientBuffers::move_together() {
  std::vector<uint32_t> open;
  for (uint32_t u = 0; u < places_.size(); ++u) {
    if (places_[u]) open.push_back(u);
  }
  std::sort(open.begin(), open.end(), [this](uint32_t a, uint32_t b) { return *places_[a] < *places_[b]; });
  arena_ = Arena(room_.buffers);
  for (uint32_t u : open) {
    const uint64_t place = *arena_.take(sizes_[u]);
    STRATA_RETURN_IF_ERROR(move_down(*places_[u], place, sizes_[u]));
    places_[u] = place;
  }
  return Ok();
}

// A device copies only between ranges that do not overlap: in pieces no longer than the way down.
Status GradientBuffers::move_down(uint64_t from, uint64_t to, uint64_t bytes) const {
  for (uint64_t done = 0; done < bytes && from > to;) {
    const uint64_t piece = std::min(bytes - done, from - to);
    STRATA_RETURN_IF_ERROR(device_.copy(base_ + to + done, base_ + from + done, piece));
    done += piece;
  }
  return Ok();
}

}  // namespace strata
