// trace_file.h - the file a trace goes to: a name that is this engine's alone, and a file that is whole or not there.
//
// claim() takes the first free of <name>.json, <name>.2.json, ... by a lock on <file>.part, which is written there and
// renamed when it is whole. The lock goes with the file and ends with this object: while an engine lives, no other one,
// of this process or another, takes its name, before or after the file was written. What nobody holds is replaced: the
// trace of a run that is over, the .part of one that was killed. Where the file system has no locks, all names are
// free.
#pragma once

#include <cstdio>
#include <string>

#include "core/status.h"

namespace strata {

class TraceFile {
 public:
  // `number`: of the first name to try, 1 has none.
  TraceFile(std::string folder, std::string name, int number);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  // Makes the folder (not its parent) and takes a name there; says what is wrong with the path otherwise.
  Status claim();
  const std::string& path() const { return path_; }
  bool has_first_name() const { return is_first_name_; }

  // Everything that `fill` prints becomes the file. After an error there is no file, and no .part.
  template <class Fill>
  Status write(Fill fill) {
    FILE* file = nullptr;
    STRATA_RETURN_IF_ERROR(begin(&file));
    fill(file);
    return finish(file);
  }

 private:
  bool try_claim(const std::string& path, Status* failed);
  Status begin(FILE** file);
  Status finish(FILE* file);
  void discard();
  std::string part() const { return path_ + ".part"; }

  const std::string folder_, name_;
  const int number_;
  std::string path_;
  bool is_first_name_ = false;
  int held_ = -1;  // the .part, and later the file, with the lock
};

}  // namespace strata
