// names.h - param, segment and array names to HDF5 link paths, by the table in docs/checkpoint_format.md.
//
// The mapping is one-to-one and looks at one name at a time, but for resolve_prefixes: HDF5 cannot have a dataset "a"
// and a group "a", so a path that is the beginning of another gets a mark.
#pragma once

#include <string>
#include <vector>

namespace strata::checkpoint {

// "layers.0/weight" stays as it is; odd names are escaped. Never empty, never begins or ends with '/'.
std::string escape_path(const std::string& name);
// The same as one component: '/' is escaped too.
std::string escape_component(const std::string& name);
// Appends "%_" to every path that is a proper beginning (whole components) of another one.
void resolve_prefixes(std::vector<std::string*>& paths);

}  // namespace strata::checkpoint
