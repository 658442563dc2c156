// limits.h - what a disk gives to others: fio, and a plain loop; and what the benches of offload_nvme have in common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace strata::bench {

constexpr uint64_t kBytes = uint64_t{256} << 20, kPiece = uint64_t{1} << 20;

[[noreturn]] void die(const std::string& text);
double median(std::vector<double> values);
double seconds_now();

// `what`: "read", "write", or "mixed", half of either at once. Bytes per second over kBytes of `file`, which is there,
// by direct preads and pwrites of kPiece, from and to `memory`;
double loop_rate(const std::string& what, const std::string& file, char* memory);
// and by fio (io_uring, direct, 1 MiB, depth 32), on its own clock, without its start.
double fio_rate(const std::string& what, const std::string& file);

// A folder of its own on the disk in question, empty; removed with what is in it.
class Folder {
 public:
  explicit Folder(const std::string& parent);
  ~Folder();
  Folder(const Folder&) = delete;
  const std::string path;
};

}  // namespace strata::bench
