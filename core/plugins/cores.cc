#include "core/plugins/cores.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/hash.h"

namespace strata {

namespace {

constexpr int kMaxCpus = 1 << 16, kMaxNodes = 1 << 12;
constexpr int kPreferred = 1;  // MPOL_PREFERRED of the kernel's ABI

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, FreeCpuSet>;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The process's group under cgroup v2: the line "0::/path" of /proc/self/cgroup; "" is the root.
std::string own_cgroup(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::/", 0) == 0) return line.size() > 4 ? line.substr(3) : "";
  }
  return "";
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    int first = 0, last = 0;
    const int found = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (found < 1 || first < 0) continue;
    for (int cpu = first; cpu <= (found == 2 ? std::min(last, kMaxCpus) : first); ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::string cpu_list_text(const std::vector<int>& cpus) {
  std::string text;
  for (size_t i = 0, end = 0; i < cpus.size(); i = end) {
    for (end = i + 1; end < cpus.size() && cpus[end] == cpus[end - 1] + 1;) ++end;
    text += (text.empty() ? "" : ",") + std::to_string(cpus[i]);
    if (end - i > 1) text += "-" + std::to_string(cpus[end - 1]);
  }
  return text;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  for (int room = 1024; room <= kMaxCpus; room *= 4) {
    const CpuSet set(CPU_ALLOC(static_cast<size_t>(room)));
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(room));
    if (!set) break;
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) != 0) continue;  // the kernel knows more CPUs than this
    for (int cpu = 0; cpu < room; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
    }
    break;
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

std::vector<Cpu> read_cpus(const std::vector<int>& allowed, const std::string& root) {
  std::vector<Cpu> cpus;
  for (int id : allowed) {
    const std::string path = root + "/sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/";
    const std::vector<int> siblings = parse_cpu_list(first_line(path + "thread_siblings_list"));
    cpus.push_back({id, 0, siblings.empty() ? id : siblings.front()});
  }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/sys/devices/system/node", error)) {
    int node = 0;
    if (std::sscanf(entry.path().filename().c_str(), "node%d", &node) != 1) continue;
    for (int id : parse_cpu_list(first_line(entry.path() / "cpulist"))) {
      const auto found = std::find_if(cpus.begin(), cpus.end(), [id](const Cpu& cpu) { return cpu.id == id; });
      if (found != cpus.end()) found->node = node;
    }
  }
  return cpus;
}

double cpu_quota(const std::string& root) {
  double quota = 0;
  for (std::string group = own_cgroup(root);; group.resize(group.find_last_of('/'))) {
    std::istringstream in(first_line(root + "/sys/fs/cgroup" + group + "/cpu.max"));  // "150000 100000" or "max 100000"
    double time = 0, period = 0;
    if (in >> time >> period && period > 0) quota = quota > 0 ? std::min(quota, time / period) : time / period;
    if (group.empty()) return quota;
  }
}

uint64_t cpus_fingerprint(const std::vector<int>& allowed) {
  const std::string machine = first_line("/proc/sys/kernel/random/boot_id");
  return fnv1a(allowed.data(), allowed.size() * sizeof(allowed[0]), fnv1a(machine.data(), machine.size()));
}

unsigned CoreShare::threads(double quota) const {
  const double worth = quota > 0 ? std::ceil(quota / static_cast<double>(ranks)) : 1e9;
  const size_t fair = is_part ? cpus.size() : std::max<size_t>(1, cpus.size() / ranks);
  return static_cast<unsigned>(std::max(1.0, std::min(worth, static_cast<double>(fair))));
}

CoreShare share_of(std::vector<Cpu> cpus, size_t part, size_t parts) {
  std::sort(cpus.begin(), cpus.end(),
            [](const Cpu& a, const Cpu& b) { return std::tie(a.node, a.core, a.id) < std::tie(b.node, b.core, b.id); });
  const auto same_core = [](const Cpu& a, const Cpu& b) { return a.node == b.node && a.core == b.core; };
  std::vector<size_t> begins;  // of physical cores
  for (size_t i = 0; i < cpus.size(); ++i) {
    if (i == 0 || !same_core(cpus[i - 1], cpus[i])) begins.push_back(i);
  }
  if (begins.size() < parts) {  // hyperthreads are shared out, too
    begins.resize(cpus.size());
    for (size_t i = 0; i < cpus.size(); ++i) begins[i] = i;
  }
  size_t first = 0, last = cpus.size();
  if (parts <= begins.size()) {
    const size_t units = begins.size();
    begins.push_back(cpus.size());
    first = begins[part * units / parts];
    last = begins[(part + 1) * units / parts];
  }
  CoreShare share;
  share.ranks = parts;
  share.is_part = last - first < cpus.size();
  const bool many_nodes = !cpus.empty() && cpus.front().node != cpus.back().node;
  for (size_t i = first; i < last; ++i) share.cpus.push_back(cpus[i].id);
  if (many_nodes && cpus[first].node == cpus[last - 1].node) share.node = cpus[first].node;
  std::sort(share.cpus.begin(), share.cpus.end());
  return share;
}

Status begin_thread(const std::string& what, const std::vector<int>& cpus, std::function<void()> work,
                    std::thread* out) {
  try {
    *out = std::thread([cpus, work = std::move(work)] {
      bind_this_thread(cpus);
      work();
    });
  } catch (const std::system_error& error) {
    return {STRATA_RESOURCE_EXHAUSTED, "no thread for " + what + ": " + error.what()};
  }
  return Ok();
}

void bind_this_thread(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const auto room = static_cast<size_t>(cpus.back()) + 1;
  const CpuSet set(CPU_ALLOC(room));
  const size_t bytes = CPU_ALLOC_SIZE(room);
  if (!set) return;
  CPU_ZERO_S(bytes, set.get());
  for (int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, set.get());
  (void)sched_setaffinity(0, bytes, set.get());
}

MemoryNear::MemoryNear(int node) {
  if (node < 0 || node >= kMaxNodes) return;
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  old_nodes_.resize(kMaxNodes / kBits);
  if (syscall(SYS_get_mempolicy, &old_mode_, old_nodes_.data(), kMaxNodes, nullptr, 0) != 0) return;
  std::vector<unsigned long> nodes(old_nodes_.size());
  nodes[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  set_ = syscall(SYS_set_mempolicy, kPreferred, nodes.data(), kMaxNodes) == 0;
}

MemoryNear::~MemoryNear() {
  if (set_) (void)syscall(SYS_set_mempolicy, old_mode_, old_nodes_.data(), kMaxNodes);
}

}  // namespace strata
