#include "h5_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "h5.h"

namespace strata::checkpoint::h5 {
namespace {

struct Driver {
  H5FD_t base;  // first: HDF5 knows the driver by its address
  int fd;
  haddr_t allocated;
};

Driver* driver(H5FD_t* file) { return reinterpret_cast<Driver*>(file); }
const Driver* driver(const H5FD_t* file) { return reinterpret_cast<const Driver*>(file); }

H5FD_t* open(const char*, unsigned, hid_t fapl, haddr_t) {
  return &(new Driver{{}, *static_cast<const int*>(H5Pget_driver_info(fapl)), 0})->base;
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

haddr_t get_end(const H5FD_t* file, H5FD_mem_t) {
  struct stat s {};
  return ::fstat(driver(file)->fd, &s) == 0 ? static_cast<haddr_t>(s.st_size) : HADDR_UNDEF;
}

herr_t read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, size_t bytes, void* out) {
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = ::pread(driver(file)->fd, to, bytes, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) {  // after the end
      std::memset(to, 0, bytes);
      return 0;
    }
    to += n;
    at += static_cast<haddr_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return 0;
}

herr_t write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, size_t bytes, const void* data) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(driver(file)->fd, from, bytes, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return -1;
    from += n;
    at += static_cast<haddr_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return 0;
}

herr_t truncate(H5FD_t* file, hid_t, hbool_t) {
  return ::ftruncate(driver(file)->fd, static_cast<off_t>(driver(file)->allocated));
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
  c.fapl_size = sizeof(int);
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

void use_memory(hid_t fapl, int fd) {
  static const H5FD_class_t kClass = make_class();
  const Id id(H5FDregister(&kClass), H5FDunregister);  // `fapl` holds it further
  H5Pset_driver(fapl, id.get(), &fd);
}

}  // namespace strata::checkpoint::h5
