// disk_dirs.h - directories for tests of a tier on disk: in the build tree, which lies on a real file system, never on
// tmpfs, and on small file systems of their own where this process may make some.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace strata::test {

class DiskDir {
 public:
  DiskDir() {
    std::string name = STRATA_BUILD_DIR "/tests/disk-XXXXXX";
    if (!::mkdtemp(name.data())) ADD_FAILURE() << name;
    path = name;
  }
  ~DiskDir() {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    EXPECT_FALSE(error) << path << ": " << error.message();
  }
  DiskDir(const DiskDir&) = delete;

  size_t entries() const {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path)) count += entry.exists();
    return count;
  }
  std::string path;
};

// An ext4 of its own in a file, mounted through a loop device with this sector size. `missing` says why there is none.
class LoopFs {
 public:
  LoopFs(int mebibytes, int sector_bytes) {
    const std::string image = dir_.path + "/image";
    if (::geteuid() != 0) {
      missing = "only root makes loop devices";
      return;
    }
    if (!run("truncate -s " + std::to_string(mebibytes) + "M " + image)) return;
    device_ = output("losetup --find --show --sector-size " + std::to_string(sector_bytes) + " " + image);
    if (device_.empty()) {
      missing = "no loop device with sectors of " + std::to_string(sector_bytes) + " bytes";
      return;
    }
    path = dir_.path + "/mounted";
    std::filesystem::create_directory(path);
    if (!run("mkfs.ext4 -q -F -m 0 -O ^has_journal " + device_)) return;
    mounted_ = run("mount " + device_ + " " + path);
  }
  ~LoopFs() {
    // The kernel lets go of an io_uring's files a moment after the ring is closed.
    for (int i = 0; mounted_ && ::umount(path.c_str()) != 0; ++i) {
      if (i == 1000)
        ADD_FAILURE() << "umount " << path << ": something is left open there", ::umount2(path.c_str(), MNT_DETACH);
      if (i == 1000) break;
      ::usleep(5000);
    }
    if (!device_.empty()) (void)run("losetup --detach " + device_);
  }
  LoopFs(const LoopFs&) = delete;

  bool remount_read_only() { return run("mount -o remount,ro " + path); }

  std::string path, missing;

 private:
  bool run(const std::string& command) {
    if (std::system((command + " >/dev/null 2>&1").c_str()) == 0) return true;
    missing = "this does not work here: " + command;
    return false;
  }
  static std::string output(const std::string& command) {
    std::FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
    char line[256] = "";
    if (pipe && !std::fgets(line, sizeof(line), pipe)) line[0] = 0;
    if (pipe) ::pclose(pipe);
    std::string text = line;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }
  DiskDir dir_;
  std::string device_;
  bool mounted_ = false;
};

}  // namespace strata::test
