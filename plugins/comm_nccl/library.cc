#include "library.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <vector>

#include "plugin_kit/error.h"

namespace comm_nccl {
namespace {

using strata::plugin_kit::join;
using strata::plugin_kit::raise;

constexpr char kName[] = "libnccl.so.2";
constexpr int kOldest = NCCL_VERSION(2, 19, 0);  // the first that registers memory with a communicator

bool is_folder(const std::string& path) {
  struct stat about {};
  return ::stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

std::vector<std::string> candidates(const std::string& asked) {
  if (asked.empty()) return {kName};
  if (!is_folder(asked)) return {asked};
  return {asked + "/" + kName, asked + "/nvidia/nccl/lib/" + kName};
}

void* find(const std::string& asked) {
  if (asked.empty()) {
    // Global symbols, or, as PyTorch loads it, a library whose symbols only its users see.
    if (::dlsym(RTLD_DEFAULT, "ncclGetVersion")) return RTLD_DEFAULT;
    if (void* handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return handle;
  }
  std::string tried;
  for (const std::string& path : candidates(asked)) {
    if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) return handle;
    tried += join("; ", ::dlerror());
  }
  raise(STRATA_NOT_FOUND, "NCCL was not found",
        asked.empty() ? ": no copy is loaded in this process, and none where the loader looks (option libnccl names it)"
                      : join(" by option libnccl = \"", asked, "\""),
        tried);
}

std::string path_of(void* symbol) {
  Dl_info about{};
  return ::dladdr(symbol, &about) && about.dli_fname ? about.dli_fname : "this process";
}

template <class Function>
void take(void* library, const Nccl& nccl, const char* name, Function* out) {
  void* symbol = ::dlsym(library, name);
  if (!symbol) {
    raise(STRATA_FAILED_PRECONDITION, "NCCL ", version_text(nccl.version), " at ", nccl.path, " has no ", name, "; ",
          version_text(kOldest), " or newer is needed");
  }
  *out = reinterpret_cast<Function>(symbol);
}

}  // namespace

std::string version_text(int version) {
  if (version < 10000) return join(version / 1000, ".", version % 1000 / 100, ".", version % 100);
  return join(version / 10000, ".", version % 10000 / 100, ".", version % 100);
}

std::shared_ptr<const Nccl> load_nccl(const std::string& asked) {
  void* const library = find(asked);
  auto nccl = std::make_shared<Nccl>();
  void* const version = ::dlsym(library, "ncclGetVersion");
  nccl->path = version ? path_of(version) : asked;
  take(library, *nccl, "ncclGetVersion", &nccl->get_version);
  if (nccl->get_version(&nccl->version) != ncclSuccess || nccl->version < kOldest) {
    raise(STRATA_FAILED_PRECONDITION, "NCCL at ", nccl->path, " is too old: ", version_text(nccl->version), ", ",
          version_text(kOldest), " or newer is needed (option libnccl names another)");
  }
  take(library, *nccl, "ncclGetUniqueId", &nccl->get_unique_id);
  take(library, *nccl, "ncclCommInitRankConfig", &nccl->init_rank);
  take(library, *nccl, "ncclCommSplit", &nccl->split);
  take(library, *nccl, "ncclCommDestroy", &nccl->destroy);
  take(library, *nccl, "ncclCommAbort", &nccl->abort);
  take(library, *nccl, "ncclCommGetAsyncError", &nccl->async_error);
  take(library, *nccl, "ncclGetErrorString", &nccl->error_string);
  take(library, *nccl, "ncclGetLastError", &nccl->last_error);
  take(library, *nccl, "ncclAllGather", &nccl->all_gather);
  take(library, *nccl, "ncclReduceScatter", &nccl->reduce_scatter);
  take(library, *nccl, "ncclAllReduce", &nccl->all_reduce);
  take(library, *nccl, "ncclBroadcast", &nccl->broadcast);
  take(library, *nccl, "ncclSend", &nccl->send);
  take(library, *nccl, "ncclRecv", &nccl->recv);
  take(library, *nccl, "ncclGroupStart", &nccl->group_start);
  take(library, *nccl, "ncclGroupEnd", &nccl->group_end);
  take(library, *nccl, "ncclMemAlloc", &nccl->mem_alloc);
  take(library, *nccl, "ncclMemFree", &nccl->mem_free);
  take(library, *nccl, "ncclCommRegister", &nccl->register_memory);
  take(library, *nccl, "ncclCommDeregister", &nccl->deregister_memory);
  return nccl;
}

}  // namespace comm_nccl
