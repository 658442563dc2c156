// h5.h - the part of HDF5 this plugin uses, behind RAII and one lock. The only files that include HDF5 are this
// pair and h5_memory.
//
// HDF5 keeps global state, so every use happens inside a Session: it holds one mutex for the whole process (the
// plugin's only global, needed because ranks may be threads of one process with an instance each), and silences
// HDF5's error printing on this thread meanwhile. Sessions do not nest, and bulk data never moves inside one.
//
// Every identifier is an Id and closed by its owner: a leaked one crashes the process when HDF5 shuts down at exit. So
// does a write that failed: a new file is laid out in memory, sparse where the data will be, and copied to the disk.
// Nothing here lets HDF5 convert a value: memory types always equal file types.
#pragma once

#include <hdf5.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "h5_memory.h"
#include "model.h"

namespace strata::checkpoint::h5 {

class Session {
 public:
  Session();
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* print_data_ = nullptr;
};

class Id {
 public:
  Id(hid_t id, herr_t (*closer)(hid_t)) : id_(id), close_(closer) {}
  Id(Id&& other) noexcept : id_(other.id_), close_(other.close_) { other.id_ = -1; }
  Id(const Id&) = delete;
  Id& operator=(const Id&) = delete;
  ~Id() {
    if (id_ >= 0) close_(id_);
  }
  hid_t get() const { return id_; }
  herr_t close() {
    const hid_t id = id_;
    id_ = -1;
    return close_(id);
  }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

// Where a contiguous dataset's bytes lie in the file.
struct Place {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// One box of a virtual dataset: elements [source_offset, +product of count) of a 1-D dataset of `source_elements`.
struct Mapping {
  std::string file;
  std::string dataset;
  uint64_t source_elements;
  uint64_t source_offset;
  std::vector<hsize_t> start, count;  // in the virtual dataset; empty for a scalar
};

// An open file; use inside a Session, and let it end before the Session does.
class File {
 public:
  // New file: objects of at least `threshold` bytes start at multiples of `alignment`, after a user block.
  static File create(const std::string& path, uint64_t threshold, uint64_t alignment, uint64_t user_block);
  static File open(const std::string& path);

  // A contiguous dataset with its blocks allocated and nothing written; no bytes when it has no elements.
  Place create_dataset(const std::string& path, strata_dtype dtype, const std::vector<hsize_t>& shape);
  Place create_hashes(const std::string& path, uint64_t count);
  void create_virtual(const std::string& path, strata_dtype dtype, const std::vector<hsize_t>& shape,
                      const std::vector<Mapping>& mappings);
  void create_alias(const std::string& path, const std::string& existing);
  void write_text(const std::string& path, const std::string& text);  // with its hash as attribute
  void write_attribute(const char* name, const std::string& value);
  void write_attribute(const char* name, uint64_t value);

  // Where the dataset lies, checked: contiguous, `elements` elements of `element_bytes`, inside the file.
  Place find(const std::string& path, uint64_t elements, uint64_t element_bytes) const;
  std::string read_text(const std::string& path) const;  // checked against its hash
  std::string read_attribute_text(const char* name) const;
  uint64_t read_attribute(const char* name) const;

  // Ends a file that was created: it goes to the disk, over what has its name.
  void close();

 private:
  File(std::string path, Id id, strata_status code);
  hid_t check(hid_t result, const std::string& what) const;  // raises with HDF5's own reason
  Id create_contiguous(const std::string& path, hid_t type, const std::vector<hsize_t>& shape);
  Place place_of(hid_t dataset, const std::string& path) const;

  std::string path_;
  std::unique_ptr<Memory> memory_;  // of a new file; outlives the Id below, which writes to it
  Id id_;
  strata_status code_;  // of failures: INTERNAL while writing, DATA_LOSS while reading
  uint64_t file_bytes_ = 0;
};

}  // namespace strata::checkpoint::h5
