// save.h - a save in progress, and what the phases of a save share.
//
// save.cc: a rank writes its own file. index.cc: rank 0 makes the checkpoint out of all of them. export.cc: the same
// two phases for the one weight file, which is either a part of the checkpoint or all there is. replace.cc: how it gets
// its name. The order of file system calls is the commit protocol of docs/checkpoint_format.md: nothing incomplete ever
// has a final name.
#pragma once

#include <atomic>
#include <string>

#include "files.h"
#include "h5.h"
#include "io/direct_file.h"
#include "model.h"
#include "strata/host.h"

// An open plugin instance.
struct strata_ckpt {
  const strata_host* host;
  bool verify;
  bool direct_io;
  unsigned io_threads;
  std::atomic<bool> warned{false};
  std::atomic<bool> said_two_renames{false};
};

// Between a successful write (or export phase) and commit or abandon.
struct strata_ckpt_save {
  strata::checkpoint::Description description;
  bool has_rank_files = false;  // false: the one weight file alone
  bool has_weights = false;     // a weight file, alone or as part of the checkpoint
  std::string root;
  std::string partial;                   // directory of the save in progress; from the commit on rank 0's own
  std::string committed;                 // what it becomes: a directory, or the weight file
  std::string replaced;                  // where a checkpoint that had this name ends
  std::string file;                      // this rank's file
  strata::checkpoint::TagLock tag_lock;  // of rank 0
  strata::checkpoint::WriterLock lock, weights_lock;
};

namespace strata::checkpoint {

// save.cc
void write_rank_file(strata_ckpt& self, const strata_ckpt_save_args& args, strata_ckpt_save& save);
// Opens a laid-out file for bulk writes and gives it all its blocks. Logs once what the file system cannot do.
void open_for_data(strata_ckpt& self, const std::string& path, io::DirectFile& file);
void warn_if_not_direct(strata_ckpt& self, const std::string& path, const io::DirectFile& file);
// Calls the host's read callback; its failure is raised with the host's own text.
void read_elements(const strata_ckpt_save_args& args, uint64_t segment, uint64_t array, Range range, void* out);
std::string with_slash_stripped(std::string root);
void remove_own(strata_ckpt_save& save);

// index.cc
void commit_checkpoint(strata_ckpt& self, strata_ckpt_save& save);
// What rank 0 says of the rank descriptions it collects, here and in export.cc.
[[noreturn]] void raise_missing(const strata_ckpt_save& save, int32_t rank, const std::string& path);
void check_same_save(const strata_ckpt_save& save, int32_t rank, const std::string& path, const Description& found);
void add_ownership(Description& whole, const Description& of_rank);

// export.cc
void export_layout(strata_ckpt& self, strata_ckpt_save& save);
void export_data(strata_ckpt& self, const strata_ckpt_save_args& args, strata_ckpt_save& save);
void commit_export(strata_ckpt_save& save);
// Of a weight file that is part of a checkpoint: rank 0 makes sure that it is complete.
void finish_weights(const strata_ckpt_save& save);
inline constexpr char kWeightsFile[] = "weights.h5";  // in the partial directory, and in the checkpoint
// What this rank left beside the weight file, and on rank 0 the file itself.
void remove_own_weights(const strata_ckpt_save& save);

}  // namespace strata::checkpoint
