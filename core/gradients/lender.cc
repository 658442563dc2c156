#include "core/gradients/lender.h"

#include <algorithm>
#include <string>

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

void Lender::until_fetched(const std::vector<uint32_t>& units) {
  if (holding_ && stream_.native) awaited_ = units;
}

bool Lender::note_fetch(uint32_t unit, const strata_stream* stream) {
  if (awaited_.empty() || !is_loan_stream(stream)) return false;
  awaited_.erase(std::remove(awaited_.begin(), awaited_.end(), unit), awaited_.end());
  if (!awaited_.empty()) return false;
  give_back(stream);
  return true;
}

void Lender::give_back(const strata_stream* stream) {
  for (char* block : blocks_) {
    const HostCallback running("take_back of gradient_memory");
    host_->take_back(host_->ctx, block, stream);
  }
  blocks_.clear();
  begun_ = {};
  holding_ = false;
}

}  // namespace strata
