// h5_memory.h - HDF5's file driver for a file that is made: HDF5 writes into memory, where no write fails.
//
// A failed write leaves HDF5 1.10 with objects that it cannot close, and the process crashes at exit. The memory is a
// file without a name (memfd_create): sparse where data will be, and only what HDF5 wrote takes room.
#pragma once

#include <hdf5.h>

namespace strata::checkpoint::h5 {

// Files that are created with `fapl` are written to `fd` under whatever name. It stays the caller's, to read from once
// the file is closed.
void use_memory(hid_t fapl, int fd);

}  // namespace strata::checkpoint::h5
