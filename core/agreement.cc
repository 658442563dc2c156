#include "core/agreement.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace strata {

Agreement::Agreement(const Registry& registry, const Layout& layout, CommQueue& queue, Gradients& gradients,
                     const Counters& counters)
    : registry_(registry),
      layout_(layout),
      queue_(queue),
      gradients_(gradients),
      counters_(counters),
      stride_(round_up(sizeof(Header) + layout.units.size() * sizeof(uint32_t) + registry.units.size(), 64)),
      messages_(stride_ * (static_cast<uint64_t>(layout.world) + 1)),
      parts_(static_cast<size_t>(layout.places.world.size)) {}

std::shared_ptr<StepOutcome> Agreement::submit(uint64_t step, double max_norm, uint64_t group_hash,
                                               uint64_t world_hash) {
  auto outcome = std::make_shared<StepOutcome>();
  outcome->max_norm = max_norm;
  CommOp op;
  op.kind = CommOp::Kind::kAgree;
  op.tag = (3ull << 32) | (step & 0xffffffffu);
  op.label = "agreement on step " + std::to_string(step);
  op.exchange = {messages_.data(), of_rank(0), stride_};
  op.prepare = [this, hash = queue_.hash() ^ group_hash, used = gradients_.take_used(),
                order = gradients_.take_order()](const strata_stream*) {
    STRATA_RETURN_IF_ERROR(gradients_.wait_for_reductions());  // the norms are in host memory now
    return fill(hash, used, order);
  };
  const bool parts = layout_.places.parts() > 1;
  CommOp second;
  second.kind = op.kind;
  second.everyone = true;
  second.tag = (6ull << 32) | (step & 0xffffffffu);
  second.label = op.label + " among all parts of the model";
  op.then = [this, outcome, parts, world_hash](const strata_stream*) {
    STRATA_RETURN_IF_ERROR(conclude_group(*outcome));
    part_.hash = world_hash;
    return parts ? Ok() : decide(*outcome, part_.squares);
  };
  outcome->known = queue_.submit(std::move(op));
  if (!parts) return outcome;
  second.exchange = {&part_, parts_.data(), sizeof(part_)};
  second.then = [this, outcome](const strata_stream*) { return conclude(*outcome); };
  outcome->known = queue_.submit(std::move(second));
  return outcome;
}

// Collective thread: the norm is complete now, every reduction before this operation is done.
Status Agreement::fill(uint64_t hash, const std::vector<uint8_t>& used, const std::vector<uint32_t>& order) {
  char* at = messages_.data();
  const Header header = {gradients_.norm_partial(), hash, static_cast<uint32_t>(used.size()),
                         static_cast<uint32_t>(order.size())};
  std::memcpy(at, &header, sizeof(header));
  at = std::copy_n(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(uint32_t), at + sizeof(header));
  std::copy(used.begin(), used.end(), at);
  return Ok();
}

Status Agreement::conclude_group(StepOutcome& outcome) {
  double squares = 0;
  uint64_t hash0 = 0;
  outcome.used.assign(registry_.units.size(), 0);
  for (int r = 0; r < layout_.world; ++r) {
    const char* at = of_rank(r);
    Header header;
    std::memcpy(&header, at, sizeof(header));
    if (r == 0) {
      hash0 = header.hash;
      outcome.order.resize(header.order_count);
      std::copy_n(at + sizeof(header), header.order_count * sizeof(uint32_t),
                  reinterpret_cast<char*>(outcome.order.data()));  // of none, too
    }
    if (header.hash != hash0) {
      return {STRATA_FAILED_PRECONDITION, "rank " + std::to_string(layout_.places.in_group(r)) +
                                              " issued other collectives, or gave strata_step other learning "
                                              "rates, group settings or another max_norm, than rank " +
                                              std::to_string(layout_.places.in_group(0)) +
                                              " (their hashes differ): the step is not applied"};
    }
    if (std::isfinite(squares) && !std::isfinite(header.norm_partial)) outcome.says_why = r == layout_.rank;
    squares += header.norm_partial;
    const char* used = at + sizeof(header) + header.order_count * sizeof(uint32_t);
    for (size_t u = 0; u < outcome.used.size(); ++u) outcome.used[u] |= static_cast<uint8_t>(used[u]);
  }
  outcome.any_used = std::any_of(outcome.used.begin(), outcome.used.end(), [](uint8_t u) { return u != 0; });
  outcome.any_used_anywhere = outcome.any_used;
  part_.squares = squares;
  part_.any_used = outcome.any_used;
  return Ok();
}

// Every rank of a group brings the same, so each rank adds up those at its own place in their groups.
Status Agreement::conclude(StepOutcome& outcome) {
  const Places& places = layout_.places;
  for (size_t r = 0; r < parts_.size(); ++r) {
    if (parts_[r].hash == parts_[0].hash) continue;
    return {STRATA_FAILED_PRECONDITION, "rank " + std::to_string(r) +
                                            " gave strata_step another learning rate, other settings of group 0 or "
                                            "another max_norm than rank 0: the step is not applied"};
  }
  double squares = 0;
  for (int p = 0; p < places.parts(); ++p) {
    const GroupPart& part = parts_[static_cast<size_t>(places.in_part(p))];
    squares += part.squares;
    outcome.any_used_anywhere = outcome.any_used_anywhere || part.any_used;
  }
  return decide(outcome, squares);
}

Status Agreement::decide(StepOutcome& outcome, double squares) {
  outcome.counted = counters_.snapshot();
  const double parts = static_cast<double>(layout_.world) * gradients_.plan().micro_batches;
  outcome.norm = std::sqrt(squares) / parts;
  outcome.apply = std::isfinite(squares) && outcome.any_used_anywhere ? 1 : 0;
  const bool clips = outcome.max_norm > 0 && outcome.apply;
  outcome.clip = clips ? std::min(1.0, outcome.max_norm / (outcome.norm + 1e-6)) : 1.0;
  outcome.grad_scale = static_cast<float>(outcome.clip / parts);
  return Ok();
}

}  // namespace strata
