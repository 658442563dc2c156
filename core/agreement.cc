#include "core/agreement.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace strata {

Agreement::Agreement(const Registry& registry, const Layout& layout, double max_norm, CommQueue& queue,
                     Gradients& gradients, const Counters& counters)
    : registry_(registry),
      layout_(layout),
      max_norm_(max_norm),
      queue_(queue),
      gradients_(gradients),
      counters_(counters),
      stride_(round_up(sizeof(Header) + layout.units.size() * sizeof(uint32_t) + registry.units.size(), 64)),
      messages_(stride_ * (static_cast<uint64_t>(layout.world) + 1)) {}

std::shared_ptr<StepOutcome> Agreement::submit(uint64_t step, uint64_t arguments_hash) {
  auto outcome = std::make_shared<StepOutcome>();
  CommOp op;
  op.kind = CommOp::Kind::kAgree;
  op.tag = (3ull << 32) | (step & 0xffffffffu);
  op.label = "agreement on step " + std::to_string(step);
  op.exchange = {messages_.data(), of_rank(0), stride_};
  op.prepare = [this, hash = queue_.hash() ^ arguments_hash, used = gradients_.take_used(),
                order = gradients_.take_order()](const strata_stream*) {
    STRATA_RETURN_IF_ERROR(queue_.wait_for_reductions());  // the norms are in host memory now
    return fill(hash, used, order);
  };
  op.then = [this, outcome](const strata_stream*) { return conclude(*outcome); };
  outcome->known = queue_.submit(std::move(op));
  return outcome;
}

// Collective thread: the norm is complete now, every reduction before this operation is done.
Status Agreement::fill(uint64_t hash, const std::vector<uint8_t>& used, const std::vector<uint32_t>& order) {
  char* at = messages_.data();
  const Header header = {gradients_.norm_partial(), hash, static_cast<uint32_t>(used.size()),
                         static_cast<uint32_t>(order.size())};
  std::memcpy(at, &header, sizeof(header));
  std::memcpy(at + sizeof(header), order.data(), order.size() * sizeof(uint32_t));
  std::memcpy(at + sizeof(header) + order.size() * sizeof(uint32_t), used.data(), used.size());
  return Ok();
}

Status Agreement::conclude(StepOutcome& outcome) {
  outcome.counted = counters_.snapshot();
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
      std::memcpy(outcome.order.data(), at + sizeof(header), header.order_count * sizeof(uint32_t));
    }
    if (header.hash != hash0) {
      return {STRATA_FAILED_PRECONDITION, "rank " + std::to_string(r) +
                                              " issued other collectives, or gave strata_step other learning "
                                              "rates, than rank 0 (their hashes differ): the step is not applied"};
    }
    squares += header.norm_partial;
    if (r == layout_.rank) outcome.own_part_finite = std::isfinite(header.norm_partial);
    const char* used = at + sizeof(header) + header.order_count * sizeof(uint32_t);
    for (size_t u = 0; u < outcome.used.size(); ++u) outcome.used[u] |= static_cast<uint8_t>(used[u]);
  }
  const double parts = static_cast<double>(layout_.world) * gradients_.plan().micro_batches;
  outcome.norm = std::sqrt(squares) / parts;
  outcome.any_used = std::any_of(outcome.used.begin(), outcome.used.end(), [](uint8_t u) { return u != 0; });
  outcome.apply = std::isfinite(squares) && outcome.any_used ? 1 : 0;
  outcome.clip = max_norm_ > 0 && outcome.apply ? std::min(1.0, max_norm_ / (outcome.norm + 1e-6)) : 1.0;
  outcome.grad_scale = static_cast<float>(outcome.clip / parts);
  return Ok();
}

Status Agreement::gather(uint64_t value, const std::string& what, std::vector<uint64_t>* all) {
  CommOp op;
  op.kind = CommOp::Kind::kAgree;
  op.tag = (4ull << 32) | (fnv1a(what.data(), what.size()) & 0xffffffffu);  // ranks in different calls differ in it
  op.label = what;
  all->resize(static_cast<size_t>(layout_.world));
  op.exchange = {&value, all->data(), sizeof(value)};
  return queue_.run(std::move(op));
}

namespace {
// "rank 1, 3" for the ranks whose value is not `expected`; "" when there is none.
std::string ranks_other_than(const std::vector<uint64_t>& values, uint64_t expected) {
  std::string text;
  for (size_t r = 0; r < values.size(); ++r) {
    if (values[r] != expected) text += (text.empty() ? "rank " : ", ") + std::to_string(r);
  }
  return text;
}
}  // namespace

// One gather when all is well; all ranks see the same hashes, so all of them go on to find the value that differs.
Status Agreement::same_everywhere(const std::vector<Value>& values, const std::string& what) {
  uint64_t hash = fnv1a(nullptr, 0);
  for (const auto& [name, value] : values) hash = fnv1a(&value, sizeof(value), hash);
  std::vector<uint64_t> all;
  STRATA_RETURN_IF_ERROR(gather(hash, what, &all));
  if (ranks_other_than(all, all[0]).empty()) return Ok();
  for (const auto& [name, value] : values) {
    STRATA_RETURN_IF_ERROR(gather(value, what, &all));
    const std::string differ = ranks_other_than(all, all[0]);
    if (!differ.empty()) return {STRATA_FAILED_PRECONDITION, name + ": " + differ + " differs from rank 0"};
  }
  return {STRATA_INTERNAL, "ranks differ in a value that is the same everywhere"};
}

Status Agreement::take_from_rank0(const std::string& what, uint64_t* value) {
  std::vector<uint64_t> all;
  STRATA_RETURN_IF_ERROR(gather(*value, what, &all));
  *value = all[0];
  return Ok();
}

Status Agreement::all_ok(const Status& mine, const std::string& what) {
  std::vector<uint64_t> all;
  STRATA_RETURN_IF_ERROR(gather(static_cast<uint64_t>(mine.code()), what, &all));
  if (!mine.ok()) return mine;
  const std::string failed = ranks_other_than(all, STRATA_OK);
  return failed.empty() ? Ok() : Status(STRATA_ABORTED, what + ": it failed on " + failed);
}

}  // namespace strata
