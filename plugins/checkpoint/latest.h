// latest.h - how a checkpoint becomes the latest: the steps of docs/checkpoint_format.md, and what a kill left of them.
//
// Its tag is written to a file of the save's own first, so that a full disk is an error before anything has changed;
// then it is announced in .latest.next, and that becomes `latest`.
#pragma once

#include <string>

namespace strata::checkpoint {

// The tag in such a file. DATA_LOSS: there is none in it.
std::string read_tag(const std::string& path);
// The tag in .latest.next, when a kill came after that checkpoint was committed and before its name was moved; else "".
std::string announced_in(const std::string& root);

std::string announcement_path(const std::string& root, const std::string& tag);
void write_announcement(const std::string& root, const std::string& tag);
void announce(const std::string& root, const std::string& tag);
// What is announced becomes the latest; another save may just have seen to that.
void name_latest(const std::string& root);

}  // namespace strata::checkpoint
