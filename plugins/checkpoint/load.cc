#include "load.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "describe.h"
#include "latest.h"

namespace strata::checkpoint {
namespace {

constexpr uint64_t kReadBytes = 4 * kHashBlock;  // one read

// Whole, or of a model in parts, each of which has a root of its own in there.
bool is_checkpoint(const std::string& directory, const std::string& tag) {
  try {
    if (exists(directory + "/index.h5")) return true;
    if (!is_directory(directory)) return false;
    for (const std::string& part : list_directory(directory))
      if (exists(directory + "/" + part + "/" + tag + "/index.h5")) return true;
  } catch (const Error&) {  // somebody else's, as lost+found is
  }
  return false;
}

std::vector<std::string> committed_in(const std::string& root) {
  const std::string replaced = ".replaced";  // as replaced_path has it
  std::vector<std::string> tags;
  for (const std::string& name : list_directory(root)) {
    const bool aside = name[0] == '.' && name.ends_with(replaced);
    const std::string tag = aside ? name.substr(1, name.size() - 1 - replaced.size()) : name;
    if ((aside || name[0] != '.') && is_checkpoint(root + "/" + name, tag)) tags.push_back(tag);
  }
  std::sort(tags.begin(), tags.end());
  return tags;
}

// "; there are a, b and 3 more"; "" where there is none.
std::string listed(const std::vector<std::string>& tags) {
  constexpr size_t kShown = 20;
  std::string text;
  for (size_t k = 0; k < std::min(tags.size(), kShown); ++k) text += (k ? ", " : "; there are ") + tags[k];
  if (tags.size() > kShown) text += " and " + std::to_string(tags.size() - kShown) + " more";
  return text;
}

// NOT_FOUND says that a run may start anew: nothing is there that it would write over.
[[noreturn]] void raise_no_latest(const std::string& root, const std::string& what, bool named_one) {
  const std::vector<std::string> tags = committed_in(root);
  if (tags.empty() && !named_one) raise(STRATA_NOT_FOUND, what, "; no checkpoint was committed in ", root);
  if (tags.empty()) raise(STRATA_FAILED_PRECONDITION, what, ", nor is another checkpoint; remove latest to start anew");
  raise(STRATA_FAILED_PRECONDITION, what, listed(tags), ": name one");
}

// The tag in <root>/latest; or in .latest.next, when a kill came after that checkpoint was committed and before its
// name was moved. A name of a checkpoint that is not there announced a save that was never committed.
std::string latest_tag(const std::string& root) {
  if (const std::string tag = announced_in(root); !tag.empty()) return tag;
  const std::string path = root + "/latest";
  if (!exists(root)) raise(STRATA_NOT_FOUND, root, ": there is no such directory");
  if (!exists(path)) raise_no_latest(root, path + " is not there", false);
  const std::string tag = read_tag(path);
  if (!exists(directory_of(root, tag))) raise_no_latest(root, path + " names '" + tag + "', which is not there", true);
  return tag;
}

Description read_index(const std::string& directory) {
  const std::string path = directory + "/index.h5";
  if (!exists(path)) raise(STRATA_DATA_LOSS, path, ": the checkpoint's index is missing");
  std::string text;
  {
    h5::Session session;
    const h5::File file = h5::File::open(path);
    if (file.read_attribute_text("format") != kIndexFormat) {
      raise(STRATA_DATA_LOSS, path, ": is not the index of a checkpoint");
    }
    text = file.read_text("/strata/json");
  }
  Description d = from_json(text, kIndexFormat, path);
  d.check_owned(STRATA_DATA_LOSS, path);
  if (d.files.size() != static_cast<size_t>(d.world)) {
    raise(STRATA_DATA_LOSS, path, ": lists ", d.files.size(), " rank files for a world of ", d.world);
  }
  return d;
}

// Present, of the recorded size, an HDF5 file, and of this save.
void check_rank_file(const std::string& directory, const Description& d, int32_t rank) {
  const RankFile& expected = d.files[static_cast<size_t>(rank)];
  if (expected.file != rank_file_name(rank)) {
    raise(STRATA_DATA_LOSS, directory, "/index.h5: names '", expected.file, "' as the file of rank ", rank);
  }
  const std::string path = directory + "/" + expected.file;
  if (!exists(path)) raise(STRATA_DATA_LOSS, path, ": rank ", rank, "'s file of this checkpoint is missing");
  const uint64_t bytes = file_size(path);
  if (bytes != expected.bytes) {
    raise(STRATA_DATA_LOSS, path, ": has ", bytes, " bytes, but ", expected.bytes, " were committed");
  }
  h5::Session session;
  const h5::File file = h5::File::open(path);
  if (file.read_attribute_text("format") != kRankFormat || file.read_attribute("fingerprint") != d.fingerprint ||
      file.read_attribute("rank") != static_cast<uint64_t>(rank)) {
    raise(STRATA_DATA_LOSS, path, ": is not rank ", rank, "'s file of this checkpoint");
  }
}

void fill_views(strata_ckpt_load& load) {
  for (const Param& p : load.description.params) {
    strata_ckpt_param v{};
    v.struct_size = sizeof(v);
    v.abi_minor = STRATA_ABI_MINOR;
    v.name = p.name.c_str();
    v.dtype = p.dtype;
    v.ndim = static_cast<int32_t>(p.shape.size());
    v.shape = p.shape.data();
    v.segment = p.segment;
    v.offset = p.offset;
    v.alias_of = p.is_alias ? p.alias_of.c_str() : nullptr;
    load.params.push_back(v);
  }
  for (const Meta& m : load.description.meta) {
    strata_option v{};
    v.struct_size = sizeof(v);
    v.abi_minor = STRATA_ABI_MINOR;
    v.key = m.key.c_str();
    v.type = m.type;
    v.i = m.i;
    v.f = m.f;
    v.s = m.type == STRATA_OPT_STRING ? m.s.c_str() : nullptr;
    load.meta.push_back(v);
  }
}

}  // namespace

RankFiles::RankFiles(const ReadDirectory& directory, const Description& d, bool verify, bool direct_io)
    : directory_(directory),
      description_(d),
      verify_(verify),
      direct_io_(direct_io),
      files_(d.files.size()),
      buffer_(static_cast<char*>(std::aligned_alloc(io::kLargestAlignment, kReadBytes + io::kLargestAlignment)),
              std::free) {
  if (!buffer_) throw std::bad_alloc();
}

std::string RankFiles::path(size_t rank) const { return directory_.path() + "/" + description_.files[rank].file; }

io::DirectFile& RankFiles::open(size_t rank) {
  if (!files_[rank]) {
    auto file = std::make_unique<io::DirectFile>();
    const int e = file->open(path(rank), false, direct_io_);
    directory_.check();
    if (e == ENOENT) raise(STRATA_DATA_LOSS, path(rank), ": is not there any more");
    if (e) raise_errno(e, "open", path(rank));
    files_[rank] = std::move(file);
  }
  return *files_[rank];
}

StoredArray& RankFiles::find(size_t rank, uint64_t segment, uint64_t array) {
  const auto key = std::make_pair(rank, std::make_pair(segment, array));
  if (const auto found = arrays_.find(key); found != arrays_.end()) return found->second;
  const Segment& s = description_.segments[segment];
  const Array& a = s.arrays[array];
  io::DirectFile& data_file = open(rank);
  StoredArray stored;
  h5::Place hashes;
  uint64_t blocks = 0;
  {
    h5::Session session;
    const h5::File file = h5::File::open(path(rank));
    const h5::Place data = file.find("/segments/" + a.path, s.owned[rank].count, a.element_bytes());
    stored.offset = data.offset;
    stored.bytes = data.bytes;
    directory_.check();
    blocks = (data.bytes + kHashBlock - 1) / kHashBlock;
    if (verify_) hashes = file.find("/xxh3/" + a.path, blocks, sizeof(uint64_t));
  }
  if (verify_) {
    stored.hashes.resize(blocks);
    stored.verified.resize(blocks);
    if (const int e = data_file.read_at(hashes.offset, stored.hashes.data(), hashes.bytes)) {
      raise_errno(e, "read", path(rank));
    }
  }
  return arrays_.emplace(key, std::move(stored)).first->second;
}

void RankFiles::read(size_t rank, uint64_t segment, uint64_t array, Range part, char* out) {
  const Segment& s = description_.segments[segment];
  const uint64_t size = s.arrays[array].element_bytes();
  StoredArray& stored = find(rank, segment, array);
  const Source from{open(rank), stored, path(rank)};
  uint64_t begin = (part.offset - s.owned[rank].offset) * size;
  const uint64_t end = begin + part.count * size;
  while (begin < end) {
    const uint64_t block_end = std::min((begin / kHashBlock + 1) * kHashBlock, stored.bytes);
    const bool whole = begin % kHashBlock == 0 && end >= block_end;
    const uint64_t reached = whole ? read_whole_blocks(from, begin, end, out)
                                   : read_part_of_block(from, begin, std::min(end, block_end), out);
    out += reached - begin;
    begin = reached;
  }
}

uint64_t RankFiles::read_whole_blocks(const Source& from, uint64_t begin, uint64_t end, char* out) {
  uint64_t reach = std::min(end, begin + kReadBytes);
  if (reach != from.stored.bytes) reach = reach / kHashBlock * kHashBlock;
  const uint64_t offset = from.stored.offset + begin;
  const bool in_place = from.file.lies_right(offset, out);
  char* target = in_place ? out : buffer_.get() + offset % io::kLargestAlignment;
  if (const int e = from.file.read_direct_at(offset, target, reach - begin)) raise_errno(e, "read", from.path);
  for (uint64_t at = begin; at < reach; at += kHashBlock) verify_block(from, at / kHashBlock, target + (at - begin));
  if (!in_place) std::copy_n(target, reach - begin, out);
  return reach;
}

uint64_t RankFiles::read_part_of_block(const Source& from, uint64_t begin, uint64_t end, char* out) {
  const uint64_t block = begin / kHashBlock, start = block * kHashBlock;
  if (!verify_ || from.stored.verified[block]) {
    const int e = from.file.read_at(from.stored.offset + begin, out, end - begin);
    if (e) raise_errno(e, "read", from.path);
    return end;
  }
  const uint64_t bytes = std::min(kHashBlock, from.stored.bytes - start);
  if (const int e = from.file.read_at(from.stored.offset + start, buffer_.get(), bytes)) {
    raise_errno(e, "read", from.path);
  }
  verify_block(from, block, buffer_.get());
  std::copy_n(buffer_.get() + (begin - start), end - begin, out);
  return end;
}

void RankFiles::verify_block(const Source& from, uint64_t block, const char* data) {
  if (!verify_) return;
  const uint64_t start = block * kHashBlock, bytes = std::min(kHashBlock, from.stored.bytes - start);
  const uint64_t hash = XXH3_64bits(data, bytes);
  if (hash != from.stored.hashes[block]) {
    const uint64_t offset = from.stored.offset + start;
    raise(STRATA_DATA_LOSS, from.path, ": bytes [", offset, ", ", offset + bytes, ") are damaged: XXH3 is ", hash, ", ",
          from.stored.hashes[block], " was saved");
  }
  from.stored.verified[block] = true;
}

std::unique_ptr<strata_ckpt_load> open_checkpoint(const strata_ckpt& self, const std::string& root, const char* tag) {
  if (tag) check_tag(tag);
  auto load = std::make_unique<strata_ckpt_load>();
  load->host = self.host;
  load->tag = tag ? tag : latest_tag(root);
  const Description& d = load->description;
  try {
    load->directory = std::make_unique<ReadDirectory>(root, load->tag);
    load->description = read_index(load->directory->path());
    for (int32_t rank = 0; rank < d.world; ++rank) check_rank_file(load->directory->path(), d, rank);
  } catch (const Error& e) {
    if (load->directory) load->directory->check();
    if (e.code() != STRATA_NOT_FOUND) throw;
    if (!tag) raise(STRATA_DATA_LOSS, e.text());  // it was there
    raise(STRATA_NOT_FOUND, e.text(), exists(root) ? listed(committed_in(root)) : "");
  }
  load->directory->check();
  load->owners = d.owners_in_order();
  load->files = std::make_unique<RankFiles>(*load->directory, d, self.verify, self.direct_io);
  fill_views(*load);
  return load;
}

void read_param(strata_ckpt_load& load, uint64_t param, const std::string& array, Range part, char* out) {
  const Description& d = load.description;
  if (param >= d.params.size()) {
    raise(STRATA_INVALID_ARGUMENT, "checkpoint '", load.tag, "': param ", param, " of ", d.params.size());
  }
  const Param& p = d.params[d.params[param].owner];
  const Segment& s = d.segments[p.segment];
  const Array* a = s.find_array(array);
  if (!a)
    raise(STRATA_NOT_FOUND, "checkpoint '", load.tag, "': no array '", array, "' was saved for param '", p.name, "'");
  if (part.offset > p.elements || part.count > p.elements - part.offset) {
    raise(STRATA_OUT_OF_RANGE, "checkpoint '", load.tag, "': elements [", part.offset, ", +", part.count,
          ") of param '", p.name, "' with ", p.elements);
  }
  const uint64_t size = a->element_bytes();
  const auto array_index = static_cast<uint64_t>(a - s.arrays.data());
  const uint64_t begin = p.offset + part.offset, end = begin + part.count;
  const auto& owners = load.owners[p.segment];
  auto it =
      std::partition_point(owners.begin(), owners.end(), [&](size_t rank) { return s.owned[rank].end() <= begin; });
  for (; it != owners.end() && s.owned[*it].offset < end; ++it) {
    const Range owned = s.owned[*it];
    const uint64_t from = std::max(begin, owned.offset), to = std::min(end, owned.end());
    try {
      load.files->read(*it, p.segment, array_index, {from, to - from}, out + (from - begin) * size);
    } catch (const Error&) {
      load.directory->check();  // a file that is going while it is replaced is not damaged
      throw;
    }
  }
}

}  // namespace strata::checkpoint
