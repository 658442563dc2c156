#include "core/gradients/lender.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/plugins/host.h"

namespace strata {

Status Lender::borrow(const std::vector<uint64_t>& bytes, const strata_stream* stream, std::vector<char*>* blocks) {
  blocks->clear();
  stream_ = stream ? *stream : strata_stream{};
  holding_ = true;
  awaited_.clear();
  for (uint64_t size : bytes) {
    void* block = size > 0 ? lend(size, stream) : nullptr;
    if (size > 0 && !block) {
      give_back(stream);
      return {STRATA_RESOURCE_EXHAUSTED,
              "the host has no " + std::to_string(size) + " bytes of device memory to lend for gradients"};
    }
    if (block) blocks_.push_back(static_cast<char*>(block));
    blocks->push_back(static_cast<char*>(block));
  }
  return Ok();
}

void* Lender::lend(uint64_t bytes, const strata_stream* stream) {
  const HostCallback running("lend of gradient_memory");
  return host_->lend(host_->ctx, bytes, stream);
}

Status Lender::before(const strata_stream* stream) const {
  return is_loan_stream(stream) ? Ok() : begun_.before(stream);
}

void Lender::until_fetched(const std::vector<uint32_t>& units, Work used) {
  if (!holding_ || !stream_.native) return;
  awaited_ = units;
  used_ = std::move(used);
}

Status Lender::note_fetch(uint32_t unit, const strata_stream* stream, std::chrono::nanoseconds patience, bool* ended) {
  if (awaited_.empty() || !is_loan_stream(stream)) return Ok();
  awaited_.erase(std::remove(awaited_.begin(), awaited_.end(), unit), awaited_.end());
  if (!awaited_.empty()) return Ok();
  if (used_) STRATA_RETURN_IF_ERROR(used_.before(stream, patience));
  give_back(stream);
  *ended = true;
  return Ok();
}

void Lender::give_back(const strata_stream* stream) {
  for (char* block : blocks_) {
    const HostCallback running("take_back of gradient_memory");
    host_->take_back(host_->ctx, block, stream);
  }
  blocks_.clear();
  begun_ = {};
  used_ = {};
  holding_ = false;
}

}  // namespace strata
