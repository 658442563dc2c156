#include "disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "host_memory/host_memory.h"
#include "io/calls.h"
#include "io/in_memory.h"
#include "io/load.h"
#include "plugin_kit/os_error.h"

namespace strata::offload_nvme {
namespace {

using io::calls;
using plugin_kit::join;
using plugin_kit::raise;
using plugin_kit::raise_errno;

constexpr uint64_t kZeros = uint64_t{1} << 20;
constexpr uint64_t kProbeShare = 64;  // of what is free: many ranks may begin at once
constexpr uint64_t kSmallRead = 4096;
constexpr int kSmallReads = 16;

// fallocate, tried again where a signal came in between: 0 or an errno.
int allocate_range(int fd, int mode, uint64_t offset, uint64_t bytes) {
  while (calls().fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int resize(int fd, uint64_t bytes) { return calls().ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno; }

struct statvfs ask(const std::string& path) {
  struct statvfs s {};
  if (calls().statvfs(path.c_str(), &s) != 0) raise_errno(errno, "ask for free space of", path);
  return s;
}

uint64_t free_in(const struct statvfs& s) { return static_cast<uint64_t>(s.f_bavail) * s.f_frsize; }

}  // namespace

Disk::Disk(std::string path, const Owner& owner, const Settings& settings, const LogFn& log)
    : path_(std::move(path)),
      settings_(settings),
      log_(log),
      patience_(settings.queue.deadline),
      directory_(path_, owner, patience_, log),
      zeros_(host_memory::allocate_shared(kZeros)) {
  if (!zeros_) raise(STRATA_RESOURCE_EXHAUSTED, "the system refused ", kZeros, " bytes");
  if (io::is_in_memory(path_)) log_(STRATA_LOG_WARN, path_ + " is a tmpfs: what it holds lies in host memory");
  open_probe();
  start_queue();
}

// 0 or an errno.
int Disk::open_file(const std::string& file, int flags, std::shared_ptr<const io::Fd>* out) {
  std::shared_ptr<io::Fd> fd;
  const int error = patience_.open(file, flags | (direct_ ? O_DIRECT : 0), &fd);
  *out = std::move(fd);
  return error;
}

// The file at which the file system is tried out: with O_DIRECT, or without and a warning.
void Disk::open_probe() {
  const auto held = hold(path_, patience_);
  const std::string file = directory_.path() + "/" + kProbe;
  const int flags = O_CREAT | O_RDWR;
  int error = open_file(file, flags, &probe_.fd);
  if (error == EINVAL) {
    direct_ = false;
    error = open_file(file, flags, &probe_.fd);
  }
  if (error) patience_.raise(error, "make", file);
  const uint64_t least = 2 * io::kLargestAlignment;
  const uint64_t free = free_bytes();
  probe_bytes_ = std::max(least, std::min(settings_.probe_bytes, free / kProbeShare) / kZeros * kZeros);
  error = patience_.ask("fallocate of " + file, [fd = probe_.fd, bytes = probe_bytes_] {
    const int refused = allocate_range(fd->get(), 0, 0, bytes);
    return refused == EOPNOTSUPP ? resize(fd->get(), bytes) : refused;
  });
  if (error) patience_.raise(error, join("take ", probe_bytes_, " bytes (", free, " are free) for"), file);
  const auto rule = std::make_shared<io::DirectRule>();
  if (direct_) {
    error = patience_.ask("read of " + file,
                          [fd = probe_.fd, rule] { return io::find_direct_rule(fd->get(), rule.get()); });
    if (!error) rule_ = *rule;
  }
  if (error == EINVAL) {
    direct_ = false;
    error = open_file(file, flags, &probe_.fd);
    if (error) patience_.raise(error, "open", file);
  }
  if (error) patience_.raise(error, "read", file);
  if (!direct_) log_(STRATA_LOG_WARN, path_ + " cannot do direct I/O: its bytes go through the page cache");
}

void Disk::start_queue() {
  io::Queue::Options options = settings_.queue;
  options.alignment = std::max<uint64_t>(4096, rule_.offset);
  options.block_bytes = std::max(options.block_bytes / options.alignment, uint64_t{1}) * options.alignment;
  queue_ = std::make_unique<io::Queue>(options);
  if (!queue_->remark().empty()) {
    log_(STRATA_LOG_INFO,
         path_ + ": " + queue_->remark() + (queue_->uses_ring() ? "" : "; threads serve in its stead"));
  }
  register_memory(zeros_.get(), kZeros);
}

void Disk::register_memory(void* memory, uint64_t bytes) {
  const int error = queue_->uses_ring() ? queue_->register_memory(memory, bytes) : 0;
  if (!error || refused_memory_) return;
  refused_memory_ = true;
  log_(STRATA_LOG_INFO, join(path_, ": ", bytes, " bytes could not be registered with io_uring (", std::strerror(error),
                             error == ENOMEM ? "; RLIMIT_MEMLOCK" : "", "): transfers go without"));
}

Disk::Room Disk::room() {
  const auto held = hold(path_, patience_);
  const struct statvfs s = ask(directory_.path());
  return {free_in(s), bytes_of_probes(path_), s.f_fsid};
}

uint64_t Disk::free_bytes() const { return free_in(ask(directory_.path())); }

std::string Disk::text_of(int error) const {
  if (error == EAGAIN) return io::kAgainLimits;
  if (error != ETIMEDOUT) return std::strerror(error);
  return "the disk did not answer within " + plugin_kit::Deadline(settings_.queue.deadline).text();
}

uint64_t Disk::host_bytes() { return kZeros; }

bool Disk::is_linked(const Segment& segment) const {
  struct stat s {};
  return calls().fstat(segment.file.fd->get(), &s) != 0 || s.st_nlink > 1;
}

uint64_t Disk::spare_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& segment : segments_) {
    const uint64_t free = segment->end - segment->used;
    if (free > 0 && is_linked(*segment)) bytes += free;
  }
  return bytes;
}

Run Disk::take(uint64_t bytes, bool zeros) {
  bool used_before = false;
  const Run run = allot(bytes, &used_before);
  if (!zeros) return run;
  try {
    zero(run, used_before);
  } catch (...) {
    give(run);
    throw;
  }
  return run;
}

Run Disk::allot(uint64_t bytes, bool* used_before) {
  std::lock_guard lock(mutex_);
  for (const auto& segment : segments_) {
    const auto hole = std::find_if(segment->holes.begin(), segment->holes.end(),
                                   [bytes](const auto& each) { return each.second >= bytes; });
    if (hole == segment->holes.end() || is_linked(*segment)) continue;
    const Run run{segment.get(), hole->first, bytes};
    if (hole->second > bytes) segment->holes[hole->first + bytes] = hole->second - bytes;
    segment->holes.erase(hole);
    segment->used += bytes;
    *used_before = true;
    return run;
  }
  const bool fits =
      !segments_.empty() && segments_.back()->end + bytes <= settings_.segment_bytes && !is_linked(*segments_.back());
  Segment* const segment = fits ? segments_.back().get() : add_segment();
  const Run run{segment, segment->end, bytes};
  grow(segment, bytes);
  segment->used += bytes;
  return run;
}

void Disk::give(const Run& run) {
  std::lock_guard lock(mutex_);
  auto& holes = run.segment->holes;
  run.segment->used -= run.bytes;
  auto here = holes.emplace(run.offset, run.bytes).first;
  if (const auto after = std::next(here); after != holes.end() && after->first == here->first + here->second) {
    here->second += after->second;
    holes.erase(after);
  }
  if (here != holes.begin()) {
    const auto before = std::prev(here);
    if (before->first + before->second == here->first) {
      before->second += here->second;
      holes.erase(here);
    }
  }
  if (run.segment->used == 0) remove_segment(run.segment);
}

void Disk::copy(const Run& from, const Run& to, uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  const std::shared_ptr<char> memory = host_memory::allocate_shared(bytes);
  if (!memory) raise(STRATA_RESOURCE_EXHAUSTED, "the system refused ", bytes, " bytes");
  for (const bool write : {false, true}) {
    const Run& run = write ? to : from;
    const int error =
        queue_->transfer({write, run.segment->file, run.offset + offset, memory.get(), bytes, {}, memory});
    if (error) raise_errno(error, join(write ? "write " : "read ", bytes, " bytes of"), run.segment->path);
  }
}

Segment* Disk::add_segment() {
  auto segment = std::make_unique<Segment>();
  segment->path = join(directory_.path(), "/segment-", segments_made_);
  std::shared_ptr<const io::Fd> fd;
  if (const int error = open_file(segment->path, O_CREAT | O_EXCL | O_RDWR, &fd)) {
    patience_.raise(error, "make", segment->path);
  }
  ++segments_made_;
  segment->file = queue_->attach(std::move(fd));
  segments_.push_back(std::move(segment));
  return segments_.back().get();
}

void Disk::remove_segment(Segment* segment) {
  queue_->detach(segment->file);
  const bool was_over = patience_.is_over();
  const int error = remove_file(segment->path, patience_);
  if (error && !was_over) {
    log_(STRATA_LOG_WARN, segment->path + " could not be removed (" + patience_.text_of(error) +
                              "): nothing uses it, and it takes its space until the job is over");
  }
  // The file's space goes with the last that has it open.
  (void)patience_.ask("close of " + segment->path, [fd = std::move(segment->file.fd)] { return 0; });
  segments_.erase(
      std::find_if(segments_.begin(), segments_.end(), [segment](const auto& each) { return each.get() == segment; }));
}

int Disk::allocate(const Segment& segment, int mode, uint64_t offset, uint64_t bytes) {
  return patience_.ask("fallocate of " + segment.path, [fd = segment.file.fd, mode, offset, bytes] {
    return allocate_range(fd->get(), mode, offset, bytes);
  });
}

void Disk::grow(Segment* segment, uint64_t bytes) {
  int error = allocate(*segment, 0, segment->end, bytes);
  if (error == EOPNOTSUPP) {  // `zero` writes them instead
    allocates_ = false;
    error = patience_.ask("ftruncate of " + segment->path,
                          [fd = segment->file.fd, size = segment->end + bytes] { return resize(fd->get(), size); });
  }
  if (error) {
    const std::string file = segment->path;
    if (segment->end == 0) remove_segment(segment);
    const std::string what = join("take ", bytes, " bytes in");
    if (patience_.is_over()) patience_.raise(error, what, file);
    raise(plugin_kit::status_of_errno(error), what, " ", file, ": ", std::strerror(error), "; ", free_bytes(),
          " bytes are free on its file system");
  }
  segment->end += bytes;
}

// Fresh space reads as zeros. Writing them too makes the first step as fast as the second: file systems note which
// blocks were never written, and the first write of each then costs more.
void Disk::zero(const Run& run, bool used_before) {
  if (settings_.fast_init && allocates_) {
    const int mode = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;
    const int error = used_before ? allocate(*run.segment, mode, run.offset, run.bytes) : 0;
    if (!error) return;
    if (error != EOPNOTSUPP) patience_.raise(error, join("clear ", run.bytes, " bytes of"), run.segment->path);
  }
  std::mutex mutex;
  std::condition_variable ended;
  uint64_t left = (run.bytes + kZeros - 1) / kZeros;
  int first_error = 0;
  for (uint64_t at = 0; at < run.bytes; at += kZeros) {
    const uint64_t bytes = std::min(kZeros, run.bytes - at);
    queue_->submit({true, run.segment->file, run.offset + at, zeros_.get(), bytes,
                    [&](int error, uint64_t) {
                      std::lock_guard lock(mutex);
                      if (!first_error) first_error = error;
                      if (--left == 0) ended.notify_all();
                    },
                    zeros_});
  }
  std::unique_lock lock(mutex);
  ended.wait(lock, [&] { return left == 0; });
  if (first_error) raise_errno(first_error, join("write ", run.bytes, " bytes of zeros to"), run.segment->path);
}

Disk::Speed Disk::measure(std::chrono::milliseconds length) {
  Speed speed;
  if (length.count() > 0) {
    const uint64_t bytes = kMeasured * kZeros;
    const std::shared_ptr<char> memory = host_memory::allocate_shared(bytes);
    if (!memory) raise(STRATA_RESOURCE_EXHAUSTED, "the system refused ", bytes, " bytes for a probe");
    auto* const words = reinterpret_cast<uint64_t*>(memory.get());
    for (uint64_t i = 0, x = 1; i < bytes / sizeof(x); ++i) {  // nothing that a device could fold up
      words[i] = x = x * 6364136223846793005u + 1442695040888963407u;
    }
    uint64_t filled = 0;
    speed.write = rate(false, true, length * 3 / 10, memory, &filled);
    speed.read = rate(true, false, length * 3 / 10, memory, &filled);
    speed.mixed = rate(true, true, length * 3 / 10, memory, &filled);
    speed.latency = latency(memory, filled);
  }
  remove_probe();
  return speed;
}

// The kernel keeps a file's space as long as a ring holds the file, which may be a while longer than we do: the space
// is given back first.
void Disk::remove_probe() {
  const auto held = hold(path_, patience_);
  const std::string file = directory_.path() + "/" + kProbe;
  int error = patience_.ask("ftruncate of " + file, [fd = probe_.fd] { return resize(fd->get(), 0); });
  if (!error) error = remove_file(file, patience_);
  if (error) patience_.raise(error, "remove", file);
  error = patience_.ask("close of " + file, [fd = std::move(probe_.fd)] { return 0; });
  if (error) patience_.raise(error, "remove", file);
  probe_ = {};
}

double Disk::rate(bool read, bool write, std::chrono::nanoseconds length, const std::shared_ptr<char>& memory,
                  uint64_t* filled) {
  const uint64_t piece = std::min(kZeros, probe_bytes_);
  const io::Load load{probe_, probe_bytes_, memory, kMeasured, piece, read, write, filled};
  const io::LoadResult result = io::run_load(*queue_, load, length);
  if (result.error) raise_errno(result.error, join("probe (", write ? "write" : "read", ")"), directory_.path());
  return result.rate;
}

double Disk::latency(const std::shared_ptr<char>& memory, uint64_t filled) {
  const uint64_t bytes = std::max(kSmallRead, rule_.offset);
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < kSmallReads; ++i) {
    const uint64_t offset = i * (filled / kSmallReads) / bytes * bytes;
    const int error = queue_->transfer({false, probe_, offset, memory.get(), bytes, {}, memory});
    if (error) raise_errno(error, "probe (read)", directory_.path());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / kSmallReads;
}

}  // namespace strata::offload_nvme
