// memory.h - what alloc has given out: memory of NCCL, registered with both communicators, so that peers read and write
// it without a copy between; plain device memory, said once, where NCCL has none.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "communicators.h"

namespace comm_nccl {

class Memory {
 public:
  using WarnFn = std::function<void(const std::string&)>;
  // `communicators` NULL: world 1, which needs neither NCCL nor registration.
  Memory(std::shared_ptr<Gpu> gpu, std::shared_ptr<Communicators> communicators, WarnFn warn)
      : gpu_(std::move(gpu)), communicators_(std::move(communicators)), warn_(std::move(warn)) {}

  // 4096-aligned, zeros.
  void* alloc(uint64_t bytes);
  bool free(void* ptr);
  void free_all();

 private:
  struct Piece {
    void* base;  // what was allocated; the pointer given out may lie a little behind it
    bool from_nccl;
    void* handles[2];  // of the registrations; NULL: not registered
  };
  Piece take(uint64_t bytes);
  void register_with(Piece* piece, uint64_t bytes);
  void give_back(const Piece& piece);

  const std::shared_ptr<Gpu> gpu_;
  const std::shared_ptr<Communicators> communicators_;
  const WarnFn warn_;
  std::map<void*, Piece> pieces_;
  bool warned_ = false;
};

}  // namespace comm_nccl
