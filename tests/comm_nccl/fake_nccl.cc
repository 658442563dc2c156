// fake_nccl.cc - a libnccl.so for ranks that are threads, on streams that are threads: the functions comm_nccl uses.
//
// A group is one meeting of all ranks of a communicator: each brings its list of operations, all compute their own
// outputs from everybody's inputs, and nobody goes on before all have. As in NCCL, ranks whose lists differ wait for
// ever, until an abort; and a sum is made in the type itself, with a rounding after each addition, in another order
// than the ranks'.
#include "fake_nccl.h"

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fake_stream.h"
#include "rank_sum/rank_sum.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum class Kind { kGather, kReduceScatter, kAllReduce, kBroadcast, kSend, kRecv };

struct Operation {
  Kind kind;
  const char* in;
  char* out;
  size_t count;
  ncclDataType_t type;
  int peer;  // root, or whom to
};

struct Meeting {
  explicit Meeting(size_t world) : lists(world) {}
  std::vector<std::vector<Operation>> lists;
  size_t come = 0, computed = 0;
};

struct Group {
  explicit Group(int ranks) : world(ranks) {}
  const int world;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
  int members = 0;
};

struct Switches {
  std::mutex mutex;
  std::map<std::string, int> values, counts;
  std::map<std::string, std::shared_ptr<Group>> groups;
};

Switches& switches() {
  static auto* all = new Switches;  // threads left behind may use it while the process ends
  return *all;
}

int value(const char* what) {
  std::lock_guard lock(switches().mutex);
  return switches().values[what];
}

void count(const char* what, int by = 1) {
  std::lock_guard lock(switches().mutex);
  switches().counts[what] += by;
}

void sleep_for_ever() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

struct ncclComm {
  std::string key;
  std::shared_ptr<Group> group;
  int rank = 0;
  uint64_t sequence = 0;
  int registrations = 0;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
};

namespace {

struct Pending {
  ncclComm_t comm;
  cudaStream_t stream;
  Operation operation;
};
thread_local int depth = 0;
thread_local std::vector<Pending> pending;

size_t size_of(ncclDataType_t type) { return type == ncclInt8 ? 1 : type == ncclFloat32 ? 4 : 2; }

strata_dtype dtype_of(ncclDataType_t type) {
  return type == ncclFloat32 ? STRATA_F32 : type == ncclBfloat16 ? STRATA_BF16 : STRATA_F16;
}

bool is_pair(const Operation& operation) { return operation.kind == Kind::kSend || operation.kind == Kind::kRecv; }

// Sends and receives find each other one by one; ranks have as many as they need.
bool alike(const std::vector<Operation>& a, const std::vector<Operation>& b) {
  if (is_pair(a.front()) && is_pair(b.front())) return true;
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Operation& x, const Operation& y) {
    return x.kind == y.kind && x.count == y.count && x.type == y.type;
  });
}

// The sum from the last rank down.
std::vector<char> sum_of(const std::vector<const char*>& inputs, ncclDataType_t type, size_t elements) {
  std::vector<char> total(elements * size_of(type));
  if (elements > 0) std::memcpy(total.data(), inputs.back(), total.size());
  for (size_t r = inputs.size() - 1; r-- > 0;) {
    const void* pair[] = {total.data(), inputs[r]};
    strata::rank_sum::sum(strata::rank_sum::Isa::kScalar, pair, 2, dtype_of(type), total.data(), dtype_of(type),
                          elements, false);
  }
  return total;
}

// What operation k of `rank` puts into its output.
std::vector<char> output_of(const Meeting& meeting, size_t rank, size_t k) {
  const Operation& own = meeting.lists[rank][k];
  const size_t bytes = own.count * size_of(own.type);
  std::vector<char> out;
  if (own.kind == Kind::kGather) {
    for (const auto& list : meeting.lists) out.insert(out.end(), list[k].in, list[k].in + bytes);
  } else if (own.kind == Kind::kBroadcast) {
    const char* from = meeting.lists[static_cast<size_t>(own.peer)][k].in;
    out.assign(from, from + bytes);
  } else if (own.kind == Kind::kRecv) {
    size_t number = 0;  // of the receives from this peer
    for (size_t i = 0; i < k; ++i) {
      number += meeting.lists[rank][i].kind == Kind::kRecv && meeting.lists[rank][i].peer == own.peer;
    }
    for (const Operation& theirs : meeting.lists[static_cast<size_t>(own.peer)]) {
      if (theirs.kind != Kind::kSend || theirs.peer != static_cast<int>(rank) || number-- > 0) continue;
      out.assign(theirs.in, theirs.in + bytes);
      break;
    }
  } else if (own.kind != Kind::kSend) {
    std::vector<const char*> inputs;
    for (const auto& list : meeting.lists) {
      inputs.push_back(list[k].in + (own.kind == Kind::kReduceScatter ? rank * bytes : 0));
    }
    out = sum_of(inputs, own.type, own.count);
  }
  return out;
}

template <class Ready>
bool wait_until(std::unique_lock<std::mutex>& lock, Group& group, const std::atomic<bool>& aborted, Ready ready) {
  while (!ready()) {
    if (aborted) return false;
    group.changed.wait_for(lock, std::chrono::milliseconds(5));
  }
  return true;
}

void meet(const std::shared_ptr<Group>& group, int rank_number, uint64_t sequence, std::vector<Operation> operations,
          const std::shared_ptr<std::atomic<bool>>& aborted) {
  const size_t rank = static_cast<size_t>(rank_number), world = static_cast<size_t>(group->world);
  std::unique_lock lock(group->mutex);
  std::shared_ptr<Meeting>& slot = group->meetings[sequence];
  if (!slot) slot = std::make_shared<Meeting>(world);
  const std::shared_ptr<Meeting> meeting = slot;
  meeting->lists[rank] = std::move(operations);
  ++meeting->come;
  group->changed.notify_all();
  if (!wait_until(lock, *group, *aborted, [&] { return meeting->come == world; })) return;
  for (const auto& list : meeting->lists) {
    if (!alike(list, meeting->lists[0])) (void)wait_until(lock, *group, *aborted, [] { return false; });
  }
  if (*aborted) return;
  lock.unlock();
  std::vector<std::vector<char>> outputs;
  for (size_t k = 0; k < meeting->lists[rank].size(); ++k) outputs.push_back(output_of(*meeting, rank, k));
  lock.lock();
  ++meeting->computed;
  group->changed.notify_all();
  if (!wait_until(lock, *group, *aborted, [&] { return meeting->computed == world; })) return;
  group->meetings.erase(sequence);
  lock.unlock();
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (!outputs[k].empty()) std::memcpy(meeting->lists[rank][k].out, outputs[k].data(), outputs[k].size());
  }
}

// One meeting for each communicator of the group, on its stream.
void launch() {
  const bool hang = value("hang"), alone = value("alone");
  std::map<ncclComm_t, std::pair<cudaStream_t, std::vector<Operation>>> lists;
  for (const Pending& p : pending) {
    lists[p.comm].first = p.stream;
    lists[p.comm].second.push_back(p.operation);
  }
  pending.clear();
  for (auto& [comm, work] : lists) {
    auto job = [group = comm->group, rank = comm->rank, sequence = comm->sequence++, aborted = comm->aborted, hang,
                alone, operations = std::move(work.second)] {
      while (hang && !*aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!hang && !alone) meet(group, rank, sequence, operations, aborted);
    };
    reinterpret_cast<fake::Stream*>(work.first)->push(std::move(job));
  }
}

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, Operation operation) {
  ncclGroupStart();
  pending.push_back({comm, stream, operation});
  return ncclGroupEnd();
}

ncclComm_t join_group(const std::string& key, int world, int rank) {
  auto* comm = new ncclComm;
  comm->key = key;
  comm->rank = rank;
  {
    std::lock_guard lock(switches().mutex);
    std::shared_ptr<Group>& group = switches().groups[key];
    if (!group) group = std::make_shared<Group>(world);
    comm->group = group;
    ++switches().counts["communicators"];
  }
  std::unique_lock lock(comm->group->mutex);
  ++comm->group->members;
  comm->group->changed.notify_all();
  const bool alone = value("alone");
  while (!alone && comm->group->members < world) comm->group->changed.wait(lock);
  return comm;
}

}  // namespace

EXPORT void fake_nccl_set(const char* what, int v) {
  std::lock_guard lock(switches().mutex);
  switches().values[what] = v;
}
EXPORT int fake_nccl_get(const char* what) {
  std::lock_guard lock(switches().mutex);
  return switches().counts[what];
}

EXPORT ncclResult_t ncclGetVersion(int* version) {
  const int asked = value("version");
  *version = asked ? asked : NCCL_VERSION_CODE;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number{0};
  std::memset(id, 0, sizeof(*id));
  std::strncpy(id->internal, std::to_string(++number).c_str(), sizeof(id->internal) - 1);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world, ncclUniqueId id, int rank, ncclConfig_t*) {
  if (value("hang_init")) sleep_for_ever();
  *comm = join_group(std::string(id.internal, sizeof(id.internal)), world, rank);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int, int key, ncclComm_t* out, ncclConfig_t*) {
  *out = join_group(comm->key + " split", comm->group->world, key);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  count("destroys");
  count("communicators", -1);
  delete comm;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (value("hang_abort")) sleep_for_ever();
  comm->aborted->store(true);
  count("aborts");
  count("registrations", -comm->registrations);  // they go with it
  count("communicators", -1);
  delete comm;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = static_cast<ncclResult_t>(value("async_error"));
  return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "a fake error";
}
EXPORT const char* ncclGetLastError(ncclComm_t) { return "the fake's last words"; }

EXPORT ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  count("groups");
  if (value("fail")) {
    pending.clear();
    return ncclSystemError;
  }
  launch();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclAllGather(const void* in, void* out, size_t n, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  return add(comm, stream, {Kind::kGather, static_cast<const char*>(in), static_cast<char*>(out), n, type, 0});
}
EXPORT ncclResult_t ncclReduceScatter(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t,
                                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::kReduceScatter, static_cast<const char*>(in), static_cast<char*>(out), n, type, 0});
}
EXPORT ncclResult_t ncclAllReduce(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t,
                                  ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::kAllReduce, static_cast<const char*>(in), static_cast<char*>(out), n, type, 0});
}
EXPORT ncclResult_t ncclBroadcast(const void* in, void* out, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
  return add(comm, stream, {Kind::kBroadcast, static_cast<const char*>(in), static_cast<char*>(out), n, type, root});
}
EXPORT ncclResult_t ncclSend(const void* in, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return add(comm, stream, {Kind::kSend, static_cast<const char*>(in), nullptr, n, type, peer});
}
EXPORT ncclResult_t ncclRecv(void* out, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::kRecv, nullptr, static_cast<char*>(out), n, type, peer});
}
EXPORT ncclResult_t ncclMemAlloc(void** out, size_t bytes) {
  if (value("no_memory")) return ncclUnhandledCudaError;
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclMemFree(void* ptr) {
  std::free(ptr);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void* ptr, size_t, void** handle) {
  *handle = ptr;
  ++comm->registrations;
  count("registrations");
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  --comm->registrations;
  count("registrations", -1);
  return ncclSuccess;
}
