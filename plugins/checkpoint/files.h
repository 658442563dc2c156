// files.h - the file system calls of the commit protocol, with errors that name the path.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace strata::checkpoint {

bool exists(const std::string& path);
bool is_directory(const std::string& path);  // a link to one is none
bool same_file(int fd, const std::string& path);
uint64_t file_size(const std::string& path);
std::vector<std::string> list_directory(const std::string& path);  // without "." and ".."

// One level; true when it was this call that made it. NOT_FOUND when its parent is not there.
bool make_directory(const std::string& path);
void sync_path(const std::string& path);  // a file or a directory
void rename_over(const std::string& from, const std::string& to);
// Never replaces: ALREADY_EXISTS.
void rename_new(const std::string& from, const std::string& to);
// Exchanges two names in one step; false where the file system cannot.
bool exchange(const std::string& a, const std::string& b);
// On the disk when it returns, or not there.
void write_file(const std::string& path, const std::string& text);
// Puts `text` into <directory>/<name> by way of a temporary file; on the disk when it returns.
void write_text_file(const std::string& directory, const std::string& name, const std::string& text);
std::string read_text_file(const std::string& path);
// A file of `bytes`, over what is there: parts by their place, holes between them.
void write_sparse(const std::string& path, const std::map<uint64_t, std::string>& parts, uint64_t bytes);
void remove_quietly(const std::string& path);  // a file, or an empty directory
// What this plugin makes is one level deep. Of a link the link goes, never what it leads to.
void remove_tree(const std::string& path);

// Raises RESOURCE_EXHAUSTED with both numbers when fewer than `wanted` bytes are free where `directory` is.
void require_space(const std::string& directory, uint64_t wanted);
// Gives the file its blocks now. RESOURCE_EXHAUSTED as above; false where the file system cannot preallocate.
bool preallocate(int fd, uint64_t bytes, const std::string& path);

// An advisory lock on a file that is being written, held until destroyed: two writers of one path are noticed.
// It is an open-file-description lock, so it also tells threads of one process apart; where the file system has no
// locks it does nothing.
class WriterLock {
 public:
  WriterLock() = default;
  ~WriterLock();
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

  // Creates the file when `create`; otherwise does nothing when it is absent. FAILED_PRECONDITION when it is taken.
  void take(const std::string& path, bool create);
  bool try_take(const std::string& path, bool create);  // false when it is taken
  // One that is there and nobody's, as the file system says.
  bool take_of_the_dead(const std::string& path);
  void drop();

 private:
  bool open_and_lock(const std::string& path, bool create, bool* locked);
  int fd_ = -1;
};

// Held by rank 0 from before the first look at what is there to the end of the commit: two jobs that save to one tag
// would publish a mix. The file goes with it; a kill leaves the file, without the lock.
class TagLock {
 public:
  TagLock() = default;
  ~TagLock();
  TagLock(const TagLock&) = delete;
  void take(const std::string& root, const std::string& tag);
  bool take_of_the_dead(const std::string& root, const std::string& tag);

 private:
  std::string path_;  // "" when not held
  WriterLock lock_;
};

}  // namespace strata::checkpoint
