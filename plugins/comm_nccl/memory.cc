#include "memory.h"

#include <algorithm>

namespace comm_nccl {

using strata::plugin_kit::join;

namespace {
constexpr uint64_t kAlignment = 4096;
}

void* Memory::alloc(uint64_t bytes) {
  bytes = std::max<uint64_t>(bytes, 1);
  Piece piece = take(bytes);
  const auto address = reinterpret_cast<uintptr_t>(piece.base);
  void* const out = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  pieces_[out] = piece;
  gpu_->zero(out, bytes);
  return out;
}

Memory::Piece Memory::take(uint64_t bytes) {
  Piece piece = {};
  if (communicators_ && communicators_->usable()) {
    const Nccl& nccl = communicators_->nccl();
    std::lock_guard lock(communicators_->calls());
    const Error e = communicators_->check(nccl.mem_alloc(&piece.base, bytes), join("ncclMemAlloc of ", bytes));
    piece.from_nccl = e.ok();
    if (e.ok()) register_with(&piece, bytes);
    if (!e.ok() && !warned_) warn_(e.text() + "; memory of cudaMalloc is used instead, which is slower to exchange");
    warned_ = warned_ || !e.ok();
  }
  if (!piece.from_nccl) piece.base = gpu_->allocate(bytes + kAlignment);
  return piece;
}

void Memory::register_with(Piece* piece, uint64_t bytes) {
  const ncclComm_t comms[] = {communicators_->gathers(), communicators_->reductions()};
  for (int k = 0; k < 2; ++k) {
    const Error e = communicators_->check(
        communicators_->nccl().register_memory(comms[k], piece->base, bytes, &piece->handles[k]), "ncclCommRegister");
    if (e.ok()) continue;
    piece->handles[k] = nullptr;
    if (!warned_) warn_(e.text() + "; collectives of this memory are staged by NCCL");
    warned_ = true;
  }
}

bool Memory::free(void* ptr) {
  const auto at = pieces_.find(ptr);
  if (at == pieces_.end()) return false;
  const Piece piece = at->second;
  pieces_.erase(at);
  give_back(piece);
  return true;
}

// Where something of NCCL never ended, it may still use any of it.
void Memory::give_back(const Piece& piece) {
  if (communicators_ && communicators_->leaked()) return;
  if (!piece.from_nccl) return gpu_->release(piece.base);
  const Nccl& nccl = communicators_->nccl();
  std::lock_guard lock(communicators_->calls());
  if (communicators_->usable()) {
    const ncclComm_t comms[] = {communicators_->gathers(), communicators_->reductions()};
    for (int k = 0; k < 2; ++k) {
      if (piece.handles[k]) (void)nccl.deregister_memory(comms[k], piece.handles[k]);
    }
  }
  (void)nccl.mem_free(piece.base);
}

void Memory::free_all() {
  for (const auto& [ptr, piece] : pieces_) give_back(piece);
  pieces_.clear();
}

}  // namespace comm_nccl
