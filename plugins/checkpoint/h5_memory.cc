#include "h5_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "h5.h"

namespace strata::checkpoint::h5 {
namespace {

struct Driver {
  H5FD_t base;  // first: HDF5 knows the driver by its address
  Memory* memory;
  haddr_t allocated;
};

Driver* driver(H5FD_t* file) { return reinterpret_cast<Driver*>(file); }
const Driver* driver(const H5FD_t* file) { return reinterpret_cast<const Driver*>(file); }

H5FD_t* open(const char*, unsigned, hid_t fapl, haddr_t) {
  auto* const* memory = static_cast<Memory* const*>(H5Pget_driver_info(fapl));
  auto* made = new (std::nothrow) Driver{{}, *memory, 0};
  return made ? &made->base : nullptr;
}

herr_t close(H5FD_t* file) {
  delete driver(file);
  return 0;
}

// As of HDF5's own driver for files: what it gathers before it writes, which decides where things lie.
herr_t query(const H5FD_t*, unsigned long* flags) {
  *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
           H5FD_FEAT_AGGREGATE_SMALLDATA;
  return 0;
}

haddr_t get_allocated(const H5FD_t* file, H5FD_mem_t) { return driver(file)->allocated; }

herr_t set_allocated(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  driver(file)->allocated = end;
  return 0;
}

haddr_t get_end(const H5FD_t* file, H5FD_mem_t) { return driver(file)->memory->end(); }

herr_t read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, size_t bytes, void* out) {
  driver(file)->memory->read(at, bytes, static_cast<char*>(out));
  return 0;
}

herr_t write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, size_t bytes, const void* data) try {
  driver(file)->memory->write(at, bytes, static_cast<const char*>(data));
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

herr_t truncate(H5FD_t* file, hid_t, hbool_t) {
  driver(file)->memory->resize(driver(file)->allocated);
  return 0;
}

H5FD_class_t make_class() {
  H5FD_class_t c{};
#ifdef H5FD_CLASS_VERSION  // HDF5 1.14
  c.version = H5FD_CLASS_VERSION;
  c.value = 600;
#endif
  c.name = "strata_memory";
  c.maxaddr = INT64_MAX;  // of off_t
  c.fc_degree = H5F_CLOSE_STRONG;
  c.fapl_size = sizeof(Memory*);
  c.open = open;
  c.close = close;
  c.query = query;
  c.get_eoa = get_allocated;
  c.set_eoa = set_allocated;
  c.get_eof = get_end;
  c.read = read;
  c.write = write;
  c.truncate = truncate;
  const H5FD_mem_t types[] = H5FD_FLMAP_DICHOTOMY;
  std::memcpy(c.fl_map, types, sizeof(types));
  return c;
}

}  // namespace

void Memory::use_for(hid_t fapl) {
  static const H5FD_class_t kClass = make_class();
  const Id id(H5FDregister(&kClass), H5FDunregister);  // `fapl` holds it further
  Memory* self = this;
  H5Pset_driver(fapl, id.get(), &self);
}

void Memory::read(uint64_t at, size_t bytes, char* out) const {
  while (bytes > 0) {
    const uint64_t inside = at % kChunk;
    const size_t n = std::min<size_t>(bytes, kChunk - inside);
    const auto found = chunks_.find(at - inside);
    if (found == chunks_.end()) {
      std::memset(out, 0, n);
    } else {
      found->second.copy(out, n, inside);
    }
    out += n;
    at += n;
    bytes -= n;
  }
}

void Memory::write(uint64_t at, size_t bytes, const char* data) {
  end_ = std::max(end_, at + bytes);
  while (bytes > 0) {
    const uint64_t inside = at % kChunk;
    const size_t n = std::min<size_t>(bytes, kChunk - inside);
    std::string& chunk = chunks_[at - inside];
    if (chunk.empty()) chunk.resize(kChunk);
    chunk.replace(inside, n, data, n);
    data += n;
    at += n;
    bytes -= n;
  }
}

void Memory::resize(uint64_t end) {
  chunks_.erase(chunks_.lower_bound(end), chunks_.end());
  const auto last = chunks_.find(end - end % kChunk);
  if (last != chunks_.end())
    std::fill(last->second.begin() + static_cast<ptrdiff_t>(end % kChunk), last->second.end(), 0);
  end_ = end;
}

}  // namespace strata::checkpoint::h5
