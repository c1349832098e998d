#include "arguments.h"

#include <algorithm>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

namespace torchft_ext::bench {
namespace {

using Setter = std::function<void(Arguments&, const std::string&)>;

size_t parseBytes(const std::string& text) {
  size_t end = 0;
  const auto number = static_cast<size_t>(std::stoull(text, &end));
  const std::string unit = text.substr(end);
  if (unit.empty()) return number;
  const size_t shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : 0;
  if (shift == 0) throw std::invalid_argument("expected a number with K, M or G, found " + text);
  return number << shift;
}

const std::map<std::string, Setter>& setters() {
  static const auto& all = *new std::map<std::string, Setter>{
      {"world", [](Arguments& a, const std::string& text) { a.world = std::stoi(text); }},
      {"op", [](Arguments& a, const std::string& text) { a.op = text; }},
      {"min", [](Arguments& a, const std::string& text) { a.min = parseBytes(text); }},
      {"max", [](Arguments& a, const std::string& text) { a.max = parseBytes(text); }},
      {"factor", [](Arguments& a, const std::string& text) { a.factor = parseBytes(text); }},
      {"seconds", [](Arguments& a, const std::string& text) { a.seconds = std::stod(text); }},
      {"rounds", [](Arguments& a, const std::string& text) { a.rounds = std::stoi(text); }},
      {"role", [](Arguments& a, const std::string& text) { a.role = text; }},
      {"rank", [](Arguments& a, const std::string& text) { a.rank = std::stoi(text); }},
      {"directory", [](Arguments& a, const std::string& text) { a.directory = text; }},
      {"prefix", [](Arguments& a, const std::string& text) { a.prefix = text; }},
  };
  return all;
}

void check(const Arguments& arguments) {
  if (arguments.world < 1) throw std::invalid_argument("--world: at least 1");
  if (arguments.factor < 2) throw std::invalid_argument("--factor: at least 2");
  if (arguments.min < 1) throw std::invalid_argument("--min: at least 1");
  if (arguments.rounds < 1) throw std::invalid_argument("--rounds: at least 1");
}

}  // namespace

Arguments parseArguments(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--tcp") {
      arguments.tcp = true;
      continue;
    }
    const auto found =
        words[i].rfind("--", 0) == 0 ? setters().find(words[i].substr(2)) : setters().end();
    if (found == setters().end()) throw std::invalid_argument(words[i] + ": no such argument");
    if (++i == words.size()) throw std::invalid_argument(words[i - 1] + ": a value is missing");
    found->second(arguments, words[i]);
  }
  check(arguments);
  return arguments;
}

std::vector<std::string> wordsOf(const Arguments& arguments) {
  std::vector<std::string> words;
  const auto add = [&words](const std::string& name, const std::string& value) {
    if (!value.empty()) words.insert(words.end(), {"--" + name, value});
  };
  add("world", std::to_string(arguments.world));
  add("op", arguments.op);
  add("min", std::to_string(arguments.min));
  add("max", std::to_string(arguments.max));
  add("factor", std::to_string(arguments.factor));
  add("seconds", std::to_string(arguments.seconds));
  add("rounds", std::to_string(arguments.rounds));
  add("role", arguments.role);
  add("rank", std::to_string(arguments.rank));
  add("directory", arguments.directory);
  add("prefix", arguments.prefix);
  if (arguments.tcp) words.emplace_back("--tcp");
  return words;
}

std::vector<std::string> chosenOps(const std::string& op, const std::vector<std::string>& all) {
  if (op == "all") return all;
  std::vector<std::string> chosen;
  std::istringstream text(op);
  for (std::string one; std::getline(text, one, ',');) {
    if (std::find(all.begin(), all.end(), one) == all.end()) {
      throw std::invalid_argument("--op: " + one + " is none of them");
    }
    chosen.push_back(one);
  }
  return chosen;
}

std::vector<size_t> sizesOf(const Arguments& arguments) {
  std::vector<size_t> sizes;
  for (size_t bytes = arguments.min; bytes <= arguments.max; bytes *= arguments.factor) {
    sizes.push_back(bytes);
  }
  return sizes;
}

}  // namespace torchft_ext::bench
