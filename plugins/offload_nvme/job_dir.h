// job_dir.h - the directory in which one rank keeps its files on one disk, and what dead jobs left beside it.
//
//   <nvme_path>/strata-<job>-r<rank>-<pid>-<n>/   owner       who it is, locked (flock) as long as that one lives
//                                                 segment-<k> bytes of regions
//
// Those who make and reclaim directories hold a lock on nvme_path meanwhile. A directory is reclaimed when its owner's
// lock is free, it was made on this machine, and the process is gone: pid, start time and boot of the record. One made
// elsewhere (a shared file system) or with files of other names in it is left alone. Clean close leaves nothing.
#pragma once

#include <functional>
#include <string>

#include "io/fd.h"
#include "patience.h"
#include "strata/host.h"

namespace strata::offload_nvme {

using LogFn = std::function<void(strata_log_level, const std::string&)>;

constexpr char kProbe[] = "probe";  // a file of a directory: the disk is being measured

struct Owner {
  std::string job;
  int32_t rank = 0;
};

// Those who make directories of `parent` or probes in them, and who ask what is free beside those, take turns: until
// the descriptor is closed. Raises when `parent` is no directory, or somebody holds it for too long.
std::shared_ptr<io::Fd> hold(const std::string& parent, Patience& patience);

// 0 or an errno.
int remove_file(const std::string& file, Patience& patience);

// Bytes on disk of the probes of all jobs there: free as soon as the measurements are over. While `parent` is held.
uint64_t bytes_of_probes(const std::string& parent);

class JobDir {
 public:
  // Raises when `parent` is no directory that can be written to.
  JobDir(const std::string& parent, const Owner& owner, Patience& patience, LogFn log);
  ~JobDir();
  JobDir(const JobDir&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::shared_ptr<io::Fd> record_;
  Patience& patience_;
  const LogFn log_;
};

}  // namespace strata::offload_nvme
