#include "rules.h"

#include <charconv>

#include "plugin_kit/error.h"

namespace strata::fault {
namespace {

std::vector<std::string> split(const std::string& text, char separator, size_t most) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (parts.size() + 1 < most) {
    const size_t end = text.find(separator, begin);
    if (end == std::string::npos) break;
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

template <class Number>
bool parse_number(const std::string& text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_code(const std::string& text, strata_status* out) {
  for (strata_status code = STRATA_CANCELLED; code <= STRATA_AGAIN; ++code) {
    if (text == plugin_kit::status_name(code)) {
      *out = code;
      return true;
    }
  }
  return parse_number(text, out) && *out > STRATA_OK;
}

bool parse_calls(const std::string& text, Rule* rule) {
  if (text == "*") return true;
  const bool open_ended = !text.empty() && text.back() == '+';
  if (!parse_number(open_ended ? text.substr(0, text.size() - 1) : text, &rule->first) || rule->first == 0)
    return false;
  if (!open_ended) rule->last = rule->first;
  return true;
}

bool parse_kind(const std::string& text, Rule* rule) {
  const std::vector<std::string> parts = split(text, '=', 2);
  const bool has_value = parts.size() == 2;
  if (parts[0] == "fail") {
    rule->kind = Kind::kFail;
    return !has_value || parse_code(parts[1], &rule->code);
  }
  if (parts[0] == "short") {
    rule->kind = Kind::kShort;
    return !has_value;
  }
  if (parts[0] == "late") {
    rule->kind = Kind::kLate;
    return has_value && parse_number(parts[1], &rule->late_ms) && rule->late_ms >= 0;
  }
  rule->kind = Kind::kHold;
  rule->gate = has_value ? parts[1] : "";
  return parts[0] == "hold" && !rule->gate.empty();
}

// Whether the rule's slot exists, and what speaks against its kind there.
std::string check_slot(const Rule& rule) {
  std::string reason = "no interface has a slot of that name";
  for (const Interface* interface : all_interfaces()) {
    if (!rule.interface.empty() && rule.interface != interface->name) continue;
    for (const Op& op : interface->ops) {
      if (rule.op != op.name) continue;
      if (rule.kind == Kind::kFail && !op.returns_status) {
        reason = "that slot returns no status, so it cannot fail";
      } else if (rule.kind == Kind::kShort && !op.moves_bytes) {
        reason = "only offload.read and offload.write can be short";
      } else {
        return "";
      }
    }
  }
  return reason;
}

bool parse_rule(const std::string& text, Rule* rule, std::string* error) {
  rule->text = text;
  const std::vector<std::string> parts = split(text, ':', 3);
  if (parts.size() != 3) {
    *error = "it is not OP:N:KIND";
    return false;
  }
  const std::vector<std::string> names = split(parts[0], '.', 2);
  rule->op = names.back();
  if (names.size() == 2) rule->interface = names[0];
  if (!parse_calls(parts[1], rule)) {
    *error = "\"" + parts[1] + "\" is not a call number from 1, N+ or *";
    return false;
  }
  if (!parse_kind(parts[2], rule)) {
    *error = "\"" + parts[2] + "\" is none of fail, fail=CODE, short, late=MS, hold=GATE";
    return false;
  }
  *error = check_slot(*rule);
  return error->empty();
}

}  // namespace

bool parse_rules(const std::string& text, std::vector<Rule>* out, std::string* error) {
  if (trimmed(text).empty()) return true;
  for (const std::string& part : split(text, ',', SIZE_MAX)) {
    Rule rule;
    if (!parse_rule(trimmed(part), &rule, error)) {
      *error = "rule \"" + trimmed(part) + "\": " + *error;
      return false;
    }
    out->push_back(rule);
  }
  return true;
}

}  // namespace strata::fault
