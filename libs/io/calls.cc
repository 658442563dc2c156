// The system's own calls.
#include "io/calls.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <unistd.h>

namespace strata::io {
namespace {

constexpr Calls kSystem = {
    [](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); },
    ::pread,
    ::pwrite,
    ::fallocate,
    ::ftruncate,
    ::fsync,
    ::mkdir,
    ::flock,
    ::statx,
    ::fstat,
    ::statvfs,
    ::unlink,
    ::rmdir,
    ::eventfd_write,
};

}  // namespace

const Calls& calls() { return kSystem; }

}  // namespace strata::io
