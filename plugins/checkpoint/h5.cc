#include "h5.h"

#include <xxhash.h>

#include "files.h"

namespace strata::checkpoint::h5 {
namespace {

std::mutex& process_mutex() {
  static std::mutex mutex;
  return mutex;
}

// The innermost reason of HDF5's error stack; it has file names and the text of an errno.
std::string reason() {
  std::string text = "no reason given";
  const auto keep_first = [](unsigned n, const H5E_error2_t* error, void* out) -> herr_t {
    if (n == 0 && error->desc) *static_cast<std::string*>(out) = error->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first, &text);
  return text;
}

// bf16 and fp16 from binary32. The order matters: each call checks the type against the fields set before.
Id small_float(size_t exponent_bits, size_t mantissa_bits, size_t bias) {
  Id type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  H5Tset_fields(type.get(), 15, mantissa_bits, exponent_bits, 0, mantissa_bits);
  H5Tset_precision(type.get(), 16);
  H5Tset_size(type.get(), 2);
  H5Tset_ebias(type.get(), bias);
  return type;
}

Id type_of(strata_dtype dtype) {
  switch (dtype) {
    case STRATA_BF16:
      return small_float(8, 7, 127);
    case STRATA_F16:
      return small_float(5, 10, 15);
    case STRATA_F32:
      return Id(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
    case STRATA_F64:
      return Id(H5Tcopy(H5T_IEEE_F64LE), H5Tclose);
    case STRATA_U8:
      return Id(H5Tcopy(H5T_STD_U8LE), H5Tclose);
    case STRATA_U16:
      return Id(H5Tcopy(H5T_STD_U16LE), H5Tclose);
    case STRATA_I64:
      return Id(H5Tcopy(H5T_STD_I64LE), H5Tclose);
    default:
      raise(STRATA_INTERNAL, "no HDF5 type for dtype ", dtype);
  }
}

// What a reader sees where data is missing: NaN, and all bits set for integers. Given in the file's own type.
std::string fill_bytes(strata_dtype dtype) {
  switch (dtype) {
    case STRATA_F32:
      return {"\x00\x00\xc0\x7f", 4};
    case STRATA_F64:
      return {"\x00\x00\x00\x00\x00\x00\xf8\x7f", 8};
    case STRATA_BF16:
      return {"\xc0\x7f", 2};
    case STRATA_F16:
      return {"\x00\x7e", 2};
    default:
      return std::string(find_dtype(dtype)->bytes, '\xff');
  }
}

Id space_of(const std::vector<hsize_t>& shape) {
  if (shape.empty()) return Id(H5Screate(H5S_SCALAR), H5Sclose);
  return Id(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), H5Sclose);
}

// Links with UTF-8 names, and the groups on the way to them.
Id link_properties() {
  Id lcpl(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(lcpl.get(), 1);
  H5Pset_char_encoding(lcpl.get(), H5T_CSET_UTF8);
  return lcpl;
}

Id file_access() {
  Id fapl(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_file_locking(fapl.get(), false, true);  // who may write is settled by WriterLock
  H5Pset_fclose_degree(fapl.get(), H5F_CLOSE_STRONG);
  return fapl;
}

void attach_text(hid_t object, const char* name, const std::string& value) {
  Id type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), value.size());
  Id space(H5Screate(H5S_SCALAR), H5Sclose);
  Id attribute(H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (attribute.get() < 0 || H5Awrite(attribute.get(), type.get(), value.data()) < 0) {
    raise(STRATA_INTERNAL, "write HDF5 attribute ", name, ": ", reason());
  }
}

void attach_number(hid_t object, const char* name, uint64_t value) {
  Id space(H5Screate(H5S_SCALAR), H5Sclose);
  Id attribute(H5Acreate2(object, name, H5T_STD_U64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (attribute.get() < 0 || H5Awrite(attribute.get(), H5T_STD_U64LE, &value) < 0) {
    raise(STRATA_INTERNAL, "write HDF5 attribute ", name, ": ", reason());
  }
}

}  // namespace

Session::Session() : lock_(process_mutex()) {
  H5Eget_auto2(H5E_DEFAULT, &print_, &print_data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Session::~Session() { H5Eset_auto2(H5E_DEFAULT, print_, print_data_); }

File::File(std::string path, Id id, strata_status code) : path_(std::move(path)), id_(std::move(id)), code_(code) {
  check(id_.get(), code == STRATA_DATA_LOSS ? "open" : "create");
}

hid_t File::check(hid_t result, const std::string& what) const {
  if (result < 0) raise(code_, path_, ": HDF5 could not ", what, ": ", reason());
  return result;
}

File File::create(const std::string& path, uint64_t threshold, uint64_t alignment, uint64_t user_block) {
  Id fapl = file_access();
  H5Pset_alignment(fapl.get(), threshold, alignment);
  Id fcpl(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_userblock(fcpl.get(), user_block);
  auto memory = std::make_unique<Memory>();
  memory->use_for(fapl.get());
  File file(path, Id(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, fcpl.get(), fapl.get()), H5Fclose), STRATA_INTERNAL);
  file.memory_ = std::move(memory);
  return file;
}

File File::open(const std::string& path) {
  const uint64_t bytes = file_size(path);  // and NOT_FOUND when there is none
  Id fapl = file_access();
  File file(path, Id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, fapl.get()), H5Fclose), STRATA_DATA_LOSS);
  file.file_bytes_ = bytes;
  return file;
}

Id File::create_contiguous(const std::string& path, hid_t type, const std::vector<hsize_t>& shape) {
  Id space = space_of(shape);
  Id lcpl = link_properties();
  Id dcpl(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_layout(dcpl.get(), H5D_CONTIGUOUS);
  H5Pset_alloc_time(dcpl.get(), H5D_ALLOC_TIME_EARLY);
  H5Pset_fill_time(dcpl.get(), H5D_FILL_TIME_NEVER);
  H5Pset_obj_track_times(dcpl.get(), false);  // equal content, equal bytes
  Id dataset(H5Dcreate2(id_.get(), path.c_str(), type, space.get(), lcpl.get(), dcpl.get(), H5P_DEFAULT), H5Dclose);
  check(dataset.get(), "create dataset " + path);
  return dataset;
}

Place File::place_of(hid_t dataset, const std::string& path) const {
  Place place;
  place.bytes = H5Dget_storage_size(dataset);
  if (place.bytes == 0) return place;
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) raise(code_, path_, ": dataset ", path, " is not one contiguous range of the file");
  place.offset = offset;
  return place;
}

Place File::create_dataset(const std::string& path, strata_dtype dtype, const std::vector<hsize_t>& shape) {
  Id type = type_of(dtype);
  Id dataset = create_contiguous(path, type.get(), shape);
  attach_text(dataset.get(), "dtype", find_dtype(dtype)->name);
  return place_of(dataset.get(), path);
}

Place File::create_hashes(const std::string& path, uint64_t count) {
  return place_of(create_contiguous(path, H5T_STD_U64LE, {count}).get(), path);
}

void File::create_virtual(const std::string& path, strata_dtype dtype, const std::vector<hsize_t>& shape,
                          const std::vector<Mapping>& mappings) {
  Id type = type_of(dtype);
  Id space = space_of(shape);
  Id lcpl = link_properties();
  Id dcpl(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_fill_value(dcpl.get(), type.get(), fill_bytes(dtype).data());
  for (const Mapping& m : mappings) {
    Id source = space_of({m.source_elements});
    hsize_t elements = 1;
    for (hsize_t n : m.count) elements *= n;
    const hsize_t start = m.source_offset;
    check(H5Sselect_hyperslab(source.get(), H5S_SELECT_SET, &start, nullptr, &elements, nullptr), "select in " + path);
    if (!shape.empty()) {
      check(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, m.start.data(), nullptr, m.count.data(), nullptr),
            "select in " + path);
    }
    std::string dataset;  // HDF5 reads a source name as a format: its % is written twice
    for (const char c : m.dataset) dataset += c == '%' ? "%%" : std::string(1, c);
    check(H5Pset_virtual(dcpl.get(), space.get(), m.file.c_str(), dataset.c_str(), source.get()), "map " + path);
  }
  H5Sselect_all(space.get());
  Id dataset(H5Dcreate2(id_.get(), path.c_str(), type.get(), space.get(), lcpl.get(), dcpl.get(), H5P_DEFAULT),
             H5Dclose);
  check(dataset.get(), "create virtual dataset " + path);
  attach_text(dataset.get(), "dtype", find_dtype(dtype)->name);
}

void File::create_alias(const std::string& path, const std::string& existing) {
  Id lcpl = link_properties();
  check(H5Lcreate_hard(id_.get(), existing.c_str(), id_.get(), path.c_str(), lcpl.get(), H5P_DEFAULT), "link " + path);
}

void File::write_text(const std::string& path, const std::string& text) {
  Id dataset = create_contiguous(path, H5T_STD_U8LE, {text.size()});
  check(H5Dwrite(dataset.get(), H5T_STD_U8LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, text.data()), "write " + path);
  attach_number(dataset.get(), "xxh3", XXH3_64bits(text.data(), text.size()));
  check(dataset.close(), "close " + path);  // which writes what HDF5 held back
}

void File::write_attribute(const char* name, const std::string& value) { attach_text(id_.get(), name, value); }
void File::write_attribute(const char* name, uint64_t value) { attach_number(id_.get(), name, value); }

Place File::find(const std::string& path, uint64_t elements, uint64_t element_bytes) const {
  Id dataset(H5Dopen2(id_.get(), path.c_str(), H5P_DEFAULT), H5Dclose);
  check(dataset.get(), "open dataset " + path);
  Id type(H5Dget_type(dataset.get()), H5Tclose);
  const Place place = place_of(dataset.get(), path);
  if (H5Tget_size(type.get()) != element_bytes || place.bytes != elements * element_bytes) {
    raise(code_, path_, ": dataset ", path, " has ", place.bytes, " bytes, expected ", elements * element_bytes);
  }
  if (place.offset > file_bytes_ || place.bytes > file_bytes_ - place.offset) {
    raise(code_, path_, ": dataset ", path, " ends after the file's ", file_bytes_, " bytes");
  }
  return place;
}

std::string File::read_text(const std::string& path) const {
  Id dataset(H5Dopen2(id_.get(), path.c_str(), H5P_DEFAULT), H5Dclose);
  check(dataset.get(), "open dataset " + path);
  Id space(H5Dget_space(dataset.get()), H5Sclose);
  const hssize_t bytes = H5Sget_simple_extent_npoints(space.get());
  if (bytes < 0 || static_cast<uint64_t>(bytes) > file_bytes_)
    raise(code_, path_, ": ", path, " has ", bytes, " bytes");
  std::string text(static_cast<size_t>(bytes), '\0');
  check(H5Dread(dataset.get(), H5T_STD_U8LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, text.data()), "read " + path);
  Id attribute(H5Aopen(dataset.get(), "xxh3", H5P_DEFAULT), H5Aclose);
  uint64_t expected = 0;
  check(attribute.get(), "open the hash of " + path);
  check(H5Aread(attribute.get(), H5T_STD_U64LE, &expected), "read the hash of " + path);
  if (expected != XXH3_64bits(text.data(), text.size())) raise(code_, path_, ": ", path, " does not match its hash");
  return text;
}

std::string File::read_attribute_text(const char* name) const {
  Id attribute(H5Aopen(id_.get(), name, H5P_DEFAULT), H5Aclose);
  check(attribute.get(), join("open attribute ", name));
  Id type(H5Aget_type(attribute.get()), H5Tclose);
  const size_t bytes = H5Tget_size(type.get());
  if (H5Tget_class(type.get()) != H5T_STRING || H5Tis_variable_str(type.get()) > 0 || bytes > 4096) {
    raise(code_, path_, ": attribute ", name, " is not a short string");
  }
  std::string value(bytes, '\0');
  check(H5Aread(attribute.get(), type.get(), value.data()), join("read attribute ", name));
  return value;
}

uint64_t File::read_attribute(const char* name) const {
  Id attribute(H5Aopen(id_.get(), name, H5P_DEFAULT), H5Aclose);
  check(attribute.get(), join("open attribute ", name));
  uint64_t value = 0;
  check(H5Aread(attribute.get(), H5T_STD_U64LE, &value), join("read attribute ", name));
  return value;
}

void File::close() {
  check(H5Fflush(id_.get(), H5F_SCOPE_GLOBAL), "flush");
  check(id_.close(), "close");
  write_sparse(path_, memory_->chunks(), memory_->end());
}

}  // namespace strata::checkpoint::h5
