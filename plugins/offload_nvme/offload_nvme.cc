// offload_nvme.cc - strata.offload/1 on disks: a tier whose bytes are files, read and written past the page cache.
//
// One directory per rank and disk (job_dir.h), in it segment files (disk.h); an index says where each region's bytes
// lie (regions.h); transfers cut a range into what goes where (transfers.h).
//
// Threads: caps runs beside everything; the rest as the header says. Completions come from threads of the queues.
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>

#include "plugin_kit/io_range.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/plugin.h"
#include "transfers.h"

using namespace strata::offload_nvme;
using strata::plugin_kit::Error;
using strata::plugin_kit::guard;
using strata::plugin_kit::join;
using strata::plugin_kit::Options;
using strata::plugin_kit::raise;

struct strata_offload {
  // A transfer holds room of several disks until it ends: it does before the first of them goes.
  ~strata_offload() {
    for (const auto& disk : disks) disk->queue().drain();
  }

  const strata_host* host = nullptr;
  uint64_t alignment = 0;
  std::unique_ptr<Transfers> transfers;
  std::vector<std::unique_ptr<Disk>> disks;
  std::unique_ptr<Regions> regions;
  std::map<uintptr_t, uintptr_t> memory;  // registered: begin -> end
};

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kRounding = 64;          // of the budget: what whole blocks may take beside the bytes asked for
constexpr uint64_t kLeastAlignment = 4096;  // the core's shards are multiples of it

// "a, b" -> {"a", "b"}
std::vector<std::string> list(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    part.erase(0, part.find_first_not_of(" \t"));
    part.erase(part.find_last_not_of(" \t") + 1);
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

uint64_t whole_number(const Options& options, const char* key, int64_t usual, int64_t least, int64_t most) {
  const int64_t value = options.integer(key, usual);
  if (value < least || value > most) {
    raise(STRATA_INVALID_ARGUMENT, "option ", key, " = ", value, "; ", least, " to ", most, " is right");
  }
  return static_cast<uint64_t>(value);
}

struct Settings {
  std::vector<std::string> paths;
  std::vector<double> weights;  // none: measured
  Disk::Settings disk;
  uint64_t budget = 0;
  std::chrono::milliseconds probe{};
  bool checksum = false, needs_ring = false, links = false;
};

std::vector<double> read_weights(const std::string& text, size_t count) {
  std::vector<double> weights;
  for (const std::string& word : list(text)) {
    size_t used = 0;
    double value = 0;
    try {
      value = std::stod(word, &used);
    } catch (const std::exception&) {
    }
    if (used != word.size() || !std::isfinite(value) || value <= 0) {
      raise(STRATA_INVALID_ARGUMENT, "option weights: \"", word, "\" is not a number above 0");
    }
    weights.push_back(value);
  }
  if (!weights.empty() && weights.size() != count) {
    raise(STRATA_INVALID_ARGUMENT, "option weights has ", weights.size(), " numbers for ", count, " paths");
  }
  return weights;
}

// Of one directory under several names. What is not there is for who opens it to say.
void refuse_twins(const std::vector<std::string>& paths) {
  std::map<std::pair<dev_t, ino_t>, std::string> known;
  for (const std::string& path : paths) {
    struct stat s {};
    if (::stat(path.c_str(), &s) != 0) continue;
    const auto [first, is_new] = known.emplace(std::pair(s.st_dev, s.st_ino), path);
    if (is_new) continue;
    raise(STRATA_INVALID_ARGUMENT, "option nvme_path names a directory twice: ", first->second, " and ", path);
  }
}

Settings read_settings(const Options& options, int64_t deadline_ns) {
  Settings s;
  s.paths = list(options.text("nvme_path", ""));
  if (s.paths.empty()) raise(STRATA_INVALID_ARGUMENT, "option nvme_path names no directory");
  refuse_twins(s.paths);
  s.weights = read_weights(options.text("weights", ""), s.paths.size());
  s.budget = whole_number(options, "budget_bytes", 0, 0, INT64_MAX);
  s.probe = std::chrono::milliseconds(whole_number(options, "probe_ms", 500, 0, 10'000));
  s.checksum = options.flag("checksum", false);
  s.links = options.flag("links", false);
  s.disk.fast_init = options.flag("fast_init", false);
  s.disk.queue.depth = static_cast<unsigned>(whole_number(options, "queue_depth", 32, 1, 1024));
  s.disk.queue.block_bytes = whole_number(options, "block_bytes", kMiB, 65536, 64 * kMiB) / 65536 * 65536;
  s.disk.queue.deadline = std::chrono::nanoseconds(deadline_ns > 0 ? deadline_ns : INT64_MAX);
  s.disk.segment_bytes = whole_number(options, "segment_bytes", 1024 * kMiB, kMiB, int64_t{1} << 50) / kMiB * kMiB;
  if (s.probe.count() == 0) s.disk.probe_bytes = 0;
  const std::string engine = options.text("io", "auto");
  if (engine != "auto" && engine != "io_uring" && engine != "threads") {
    raise(STRATA_INVALID_ARGUMENT, "option io = \"", engine, "\"; auto, io_uring or threads is right");
  }
  s.needs_ring = engine == "io_uring";
  s.disk.queue.use_ring = engine != "threads";
  return s;
}

// Parts of 1: the given weights, else the mixed rates, else all the same.
std::vector<double> shares_of(const Settings& s, const std::vector<Disk::Speed>& speeds) {
  std::vector<double> shares = s.weights;
  for (size_t d = 0; shares.size() < speeds.size(); ++d) shares.push_back(std::max(speeds[d].mixed, 1.0));
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  return shares;
}

// What fits: no file system takes more than the shares of the disks on it. Ranks of a machine share the free space.
void choose_budget(const Settings& s, const strata_open_args& args, const std::vector<std::unique_ptr<Disk>>& disks,
                   const std::vector<double>& shares, const LogFn& log, Regions::Settings* out) {
  const int32_t ranks = std::max(args.local_world, 1);
  std::map<unsigned long, double> share_of;
  std::map<unsigned long, uint64_t> probes_of;
  std::vector<Disk::Room> rooms;
  for (size_t d = 0; d < disks.size(); ++d) {
    rooms.push_back(disks[d]->room());
    share_of[rooms[d].file_system] += shares[d];
    probes_of[rooms[d].file_system] += rooms[d].probes;
  }
  uint64_t fits = UINT64_MAX;
  std::string room;
  for (size_t d = 0; d < disks.size(); ++d) {
    const uint64_t bytes = rooms[d].free + probes_of[rooms[d].file_system];
    const double free = static_cast<double>(bytes / static_cast<uint64_t>(ranks));
    const double share = share_of[rooms[d].file_system];
    if (free / share < static_cast<double>(fits)) fits = static_cast<uint64_t>(free / share);
    room += join(disks[d]->path(), " has ", bytes, " bytes free and a share of ", shares[d], ", ");
  }
  if (share_of.size() < disks.size()) {
    room += "some paths are of one file system, ";
    log(args.rank > 0 ? STRATA_LOG_DEBUG : STRATA_LOG_INFO,
        "some paths of nvme_path are of one file system: they share its room, and are no faster than one of them");
  }
  room += join("rank ", std::max(args.rank, 0), " is one of ", ranks, " on this machine");
  if (s.budget > fits) {
    raise(STRATA_RESOURCE_EXHAUSTED, "budget_bytes = ", s.budget, " and only ", fits, " bytes fit: ", room);
  }
  out->budget = s.budget > 0 ? s.budget : fits;
  out->budget_reason =
      s.budget > 0
          ? join("the limit is option budget_bytes, not the disks: there ", fits, " bytes fit (", room, "); raise it")
          : join("the limit is what the disks have free (", room, "); free some, name more disks");
  if (!s.links) return;
  out->spare = out->budget / 2 + out->budget / kRounding;
  out->budget_reason += join("; of ", out->budget, " bytes option links keeps ", out->spare, " for linked files");
}

std::string describe(const Disk& disk, const Disk::Speed& speed, double share, bool ring) {
  std::string text = join(disk.path(), ": ", ring ? "io_uring" : "threads", ", alignment ", disk.rule().offset, ", ",
                          disk.free_bytes(), " bytes free, share ", share);
  if (speed.mixed > 0) {
    text +=
        join("; MB/s read ", std::llround(speed.read / 1e6), ", write ", std::llround(speed.write / 1e6), ", mixed ",
             std::llround(speed.mixed / 1e6), "; ", std::llround(speed.latency * 1e6), " us for a small read");
  }
  return text;
}

std::string describe(const Settings& s, uint64_t budget) {
  return join("a rank may use ", budget, " bytes", s.budget > 0 ? " (budget_bytes)" : "", "; checksum ",
              s.checksum ? "true: each block is compared after it is read" : "false: damaged bytes are not noticed",
              "; fast_init ", s.disk.fast_init ? "true: no zeros at the start" : "false: zeros at the start");
}

std::unique_ptr<strata_offload> open_tier(const strata_open_args* args) {
  const strata_host* host = args->host;
  const Settings s = read_settings(Options(args->options), args->deadline_ns);
  const auto log = [host](strata_log_level level, const std::string& text) {
    host->log(host->ctx, level, "offload_nvme", text.c_str());
  };
  auto self = std::make_unique<strata_offload>();
  self->host = host;
  const Owner owner{args->job ? args->job : "", std::max(args->rank, 0)};
  std::vector<Disk::Speed> speeds;
  uint64_t block = kLeastAlignment, memory = 1;
  for (const std::string& path : s.paths) {
    self->disks.push_back(std::make_unique<Disk>(path, owner, s.disk, log));
    Disk& disk = *self->disks.back();
    if (s.needs_ring && !disk.queue().uses_ring()) {
      raise(STRATA_FAILED_PRECONDITION, "option io = \"io_uring\", but at ", path, ": ", disk.queue().remark());
    }
    speeds.push_back(disk.measure(s.probe));
    block = std::max(block, disk.rule().offset);
    memory = std::max(memory, disk.rule().memory);
  }
  const std::vector<double> shares = shares_of(s, speeds);
  for (size_t d = 0; d < shares.size(); ++d) {
    log(args->rank > 0 ? STRATA_LOG_DEBUG : STRATA_LOG_INFO,
        describe(*self->disks[d], speeds[d], shares[d], self->disks[d]->queue().uses_ring()));
  }
  Regions::Settings regions;
  regions.segment_bytes = s.disk.segment_bytes;
  regions.block = block;
  choose_budget(s, *args, self->disks, shares, log, &regions);
  regions.checksum = s.checksum;
  log(args->rank > 0 ? STRATA_LOG_DEBUG : STRATA_LOG_INFO, describe(s, regions.budget));
  std::vector<Disk*> disks;
  for (const auto& disk : self->disks) disks.push_back(disk.get());
  self->regions = std::make_unique<Regions>(regions, disks, shares);
  self->transfers = std::make_unique<Transfers>(host, *self->regions, memory);
  return self;
}

strata_status STRATA_CALL offload_open(const strata_open_args* args, strata_offload** out) {
  return guard(args->host, "offload_nvme open", [&] { *out = open_tier(args).release(); });
}

void STRATA_CALL offload_close(strata_offload* self) { delete self; }

strata_status STRATA_CALL offload_caps(strata_offload* self, strata_offload_caps* out) {
  out->flags = 0;
  out->io_alignment = static_cast<uint32_t>(kLeastAlignment);  // larger blocks are served, more slowly
  out->max_inflight = Transfers::kMostInFlight;
  out->budget_bytes = self->regions->budget();
  out->used_bytes = self->regions->used();
  out->pinned_bytes = 0;
  if (!STRATA_HAS(out, strata_offload_caps, busy_ns)) return STRATA_OK;
  std::chrono::nanoseconds busy{0};
  for (const auto& disk : self->disks) busy += disk->queue().busy();
  out->busy_ns = static_cast<uint64_t>(busy.count()) / self->disks.size();
  if (STRATA_HAS(out, strata_offload_caps, budget_reason)) out->budget_reason = self->regions->budget_reason().c_str();
  if (!STRATA_HAS(out, strata_offload_caps, host_bytes_per_mib)) return STRATA_OK;
  out->host_bytes = self->disks.size() * Disk::host_bytes() + Transfers::host_bytes();
  out->host_bytes_per_mib = self->regions->host_bytes_per_mib();
  return STRATA_OK;
}

strata_status STRATA_CALL offload_alloc(strata_offload* self, uint64_t bytes, const char* label, strata_region* out) {
  return guard(self->host, "offload_nvme alloc", [&] { *out = self->regions->make(bytes, label); });
}

void STRATA_CALL offload_free(strata_offload* self, strata_region id) {
  guard(self->host, "offload_nvme free", [&] {
    if (self->regions->drop(id)) return;
    const std::string text = join("free of region ", id, ", which is not allocated: ignored");
    self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "offload_nvme", text.c_str());
  });
}

strata_status transfer(strata_offload* self, bool write, const strata_io_args* io, strata_event* done) {
  return guard(self->host, write ? "offload_nvme write" : "offload_nvme read", [&]() -> strata_status {
    const std::shared_ptr<Region> region = self->regions->find(io->region);
    if (!region) raise(STRATA_NOT_FOUND, "no region ", io->region);
    const Error wrong = strata::plugin_kit::check_range(*io, region->bytes);
    if (!wrong.ok()) raise(wrong.code(), "\"", region->label, "\": ", wrong.text());
    if (self->transfers->is_full()) return STRATA_AGAIN;
    self->transfers->move(write, region, io->offset, io->bytes, static_cast<char*>(io->buffer), done);
    return STRATA_OK;
  });
}

strata_status STRATA_CALL offload_read(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, false, args, done);
}

strata_status STRATA_CALL offload_write(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, true, args, done);
}

strata_status STRATA_CALL offload_register_memory(strata_offload* self, void* address, uint64_t bytes) {
  return guard(self->host, "offload_nvme register_memory", [&] {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    if (begin == 0 || bytes == 0 || begin % kLeastAlignment || bytes % kLeastAlignment || begin + bytes < begin) {
      raise(STRATA_INVALID_ARGUMENT, bytes, " bytes at ", address, " are no whole blocks of ", kLeastAlignment);
    }
    const auto after = self->memory.lower_bound(begin + 1);
    const bool overlaps = (after != self->memory.end() && after->first < begin + bytes) ||
                          (after != self->memory.begin() && std::prev(after)->second > begin);
    if (overlaps) raise(STRATA_ALREADY_EXISTS, bytes, " bytes at ", address, " overlap what is registered");
    self->memory[begin] = begin + bytes;
    for (const auto& disk : self->disks) disk->register_memory(address, bytes);
  });
}

void STRATA_CALL offload_unregister_memory(strata_offload* self, void* address) {
  guard(self->host, "offload_nvme unregister_memory", [&] {
    if (self->memory.erase(reinterpret_cast<uintptr_t>(address)) == 0) {
      const std::string text = join("unregister_memory of ", address, ", which is not registered: ignored");
      return self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "offload_nvme", text.c_str());
    }
    for (const auto& disk : self->disks) disk->unregister_memory(address);
  });
}

const strata_offload_api offload_table = {
    sizeof(strata_offload_api),
    STRATA_ABI_MINOR,
    offload_open,
    offload_close,
    offload_caps,
    offload_alloc,
    offload_free,
    nullptr,  // map: the host's default says that there is none
    offload_read,
    offload_write,
    offload_register_memory,
    offload_unregister_memory,
    nullptr,  // alloc_for: nothing of it is memory
};

const void* STRATA_CALL get_interface(const char* id) {
  return std::strcmp(id, STRATA_OFFLOAD) == 0 ? &offload_table : nullptr;
}

}  // namespace

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
  static const strata_plugin descriptor = {sizeof(descriptor), STRATA_ABI_MINOR, "offload_nvme", "0.1.0",
                                           get_interface};
  return &descriptor;
}
