// save.cc - one rank's part of a save: layout by HDF5, then the data around it.
//
// The file is made under a hidden name in the partial directory, so that a rank file with its real name is always
// whole. Sequence: lock, space, HDF5 layout (a Session), blocks, data (no Session), hashes, sync, rename, sync.
// A failure removes what this rank made and leaves others' files alone.
#include "save.h"

#include <algorithm>

#include "describe.h"
#include "replace.h"
#include "writer.h"

namespace strata::checkpoint {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMetadataPerArray = 4096;  // generous; only for the first look at the free space

// Where one array of this rank goes in its file.
struct ArrayPlace {
  uint64_t segment, array;
  Range owned;
  uint64_t element_bytes;
  h5::Place data, hashes;
};

uint64_t blocks_of(uint64_t bytes) { return (bytes + kHashBlock - 1) / kHashBlock; }

void make_root(const strata_ckpt& self, const strata_ckpt_save& save) {
  if (make_directory(save.root))
    self.host->log(self.host->ctx, STRATA_LOG_INFO, "checkpoint", (save.root + ": made, it was not there").c_str());
}

// The directory and, in it, a locked file. Another rank may be removing the partial directory of an abandoned save at
// this moment: then it is made again.
void make_partial(strata_ckpt_save& save, const std::string& temporary) {
  for (int attempt = 0;; ++attempt) {
    make_directory(save.partial);
    try {
      WriterLock finished;
      finished.take(save.file, false);
      save.lock.take(temporary, true);
      return;
    } catch (const Error& e) {
      if (e.code() != STRATA_NOT_FOUND || attempt == 100) throw;
    }
  }
}

uint64_t data_bytes(const Description& d) {
  uint64_t bytes = 0;
  for (const Segment& s : d.segments) {
    for (const Array& a : s.arrays) bytes += s.owned[0].count * a.element_bytes();
  }
  return bytes;
}

uint64_t array_count(const Description& d) {
  uint64_t n = 0;
  for (const Segment& s : d.segments) n += s.arrays.size();
  return n;
}

std::vector<ArrayPlace> lay_out(const std::string& path, const Description& d) {
  h5::Session session;
  h5::File file = h5::File::create(path, kPage, kPage, 0);
  file.write_attribute("format", std::string(kRankFormat));
  file.write_attribute("fingerprint", d.fingerprint);
  file.write_attribute("rank", static_cast<uint64_t>(d.rank));
  std::vector<ArrayPlace> places;
  for (uint64_t s = 0; s < d.segments.size(); ++s) {
    const Segment& segment = d.segments[s];
    const Range owned = segment.owned[0];
    if (owned.count == 0) continue;
    for (uint64_t a = 0; a < segment.arrays.size(); ++a) {
      const Array& array = segment.arrays[a];
      ArrayPlace place{s, a, owned, array.element_bytes(), {}, {}};
      place.data = file.create_dataset("/segments/" + array.path, array.dtype, {owned.count});
      place.hashes = file.create_hashes("/xxh3/" + array.path, blocks_of(place.data.bytes));
      places.push_back(place);
    }
  }
  file.write_text("/strata/json", to_json(d));
  file.close();
  return places;
}

void write_array(BlockWriter& writer, const strata_ckpt_save_args& args, const ArrayPlace& place,
                 std::vector<uint64_t>& hashes) {
  hashes.resize(blocks_of(place.data.bytes));
  for (uint64_t done = 0; done < place.data.bytes; done += kBufferBytes) {
    const uint64_t bytes = std::min(kBufferBytes, place.data.bytes - done);
    char* data = writer.acquire(place.data.offset + done);
    const Range part{place.owned.offset + done / place.element_bytes, bytes / place.element_bytes};
    read_elements(args, place.segment, place.array, part, data);
    writer.submit({data, place.data.offset + done, bytes, &hashes[done / kHashBlock]});
  }
}

void write_data(strata_ckpt& self, const strata_ckpt_save_args& args, const std::string& path,
                const std::vector<ArrayPlace>& places) {
  io::DirectFile file;
  open_for_data(self, path, file);
  std::vector<std::vector<uint64_t>> hashes(places.size());
  {
    BlockWriter writer(file, path, self.io_threads);
    for (size_t k = 0; k < places.size(); ++k) write_array(writer, args, places[k], hashes[k]);
    writer.finish();
  }
  for (size_t k = 0; k < places.size(); ++k) {
    const int e = file.write_at(places[k].hashes.offset, hashes[k].data(), hashes[k].size() * sizeof(uint64_t));
    if (e) raise_errno(e, "write", path);
  }
  warn_if_not_direct(self, path, file);
  if (const int e = file.sync()) raise_errno(e, "sync", path);
}

}  // namespace

std::string with_slash_stripped(std::string root) {
  while (root.size() > 1 && root.back() == '/') root.pop_back();
  return root;
}

void read_elements(const strata_ckpt_save_args& args, uint64_t segment, uint64_t array, Range range, void* out) {
  const strata_status code = args.read(args.read_ctx, segment, array, range.offset, range.count, out);
  if (code != STRATA_OK) throw Error(code, "");
}

void open_for_data(strata_ckpt& self, const std::string& path, io::DirectFile& file) {
  if (const int e = file.open(path, true, self.direct_io)) raise_errno(e, "open", path);
  if (!preallocate(file.fd(), file_size(path), path) && self.host->would_log(self.host->ctx, STRATA_LOG_DEBUG)) {
    self.host->log(self.host->ctx, STRATA_LOG_DEBUG, "checkpoint", (path + ": blocks cannot be preallocated").c_str());
  }
}

void warn_if_not_direct(strata_ckpt& self, const std::string& path, const io::DirectFile& file) {
  if (!self.direct_io || file.direct() || self.warned.exchange(true)) return;
  const std::string text = path + ": this file system has no O_DIRECT; checkpoints go through the page cache";
  self.host->log(self.host->ctx, STRATA_LOG_WARN, "checkpoint", text.c_str());
}

void remove_own(strata_ckpt_save& save) {
  if (!save.has_rank_files && save.description.rank == 0) return remove_tree(save.partial);
  if (!save.file.empty()) remove_quietly(save.file);
  if (save.has_weights) remove_own_weights(save);
  remove_quietly(save.partial);  // only when it is empty now
}

void write_rank_file(strata_ckpt& self, const strata_ckpt_save_args& args, strata_ckpt_save& save) {
  const Description& d = save.description;
  make_root(self, save);
  if (d.rank == 0) {
    save.tag_lock.take(save.root, d.tag);
    put_right(save);
    put_others_right(save);
  }
  const std::string name = rank_file_name(d.rank);
  const std::string temporary = save.partial + "/." + name;
  save.has_rank_files = true;
  save.file = save.partial + "/" + name;
  make_partial(save, temporary);
  try {
    require_space(save.partial, data_bytes(d) + kMetadataPerArray * array_count(d));
    const std::vector<ArrayPlace> places = lay_out(temporary, d);
    write_data(self, args, temporary, places);
    rename_over(temporary, save.file);
    sync_path(save.partial);
  } catch (...) {
    remove_quietly(temporary);
    remove_own(save);
    throw;
  }
}

}  // namespace strata::checkpoint
