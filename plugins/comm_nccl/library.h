// library.h - libnccl, found at run time: the functions used here, checked.
//
// In a process that has NCCL loaded (PyTorch's, say) that copy is used, because two copies would fight over the same
// resources; else the loader finds libnccl.so.2. Option libnccl names another: a file, a folder with libnccl.so.2, or a
// Python environment's site-packages. It is never unloaded.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>

namespace comm_nccl {

struct Nccl {
  std::string path;
  int version = 0;  // NCCL's own code: 22809 is 2.28.9

  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) init_rank;
  decltype(&ncclCommSplit) split;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGetLastError) last_error;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclMemAlloc) mem_alloc;
  decltype(&ncclMemFree) mem_free;
  decltype(&ncclCommRegister) register_memory;
  decltype(&ncclCommDeregister) deregister_memory;
};

// `asked`: option libnccl. Throws NOT_FOUND with every place that was looked at, FAILED_PRECONDITION: too old.
std::shared_ptr<const Nccl> load_nccl(const std::string& asked);

// "2.28.9"
std::string version_text(int version);

}  // namespace comm_nccl
