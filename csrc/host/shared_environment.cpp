#include "host/shared_environment.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>
#include <variant>

namespace torchft_ext {
namespace {

constexpr const char* kSwitch = "TORCHFT_EXT_SHARED_MEMORY";
constexpr const char* kPlans = "TORCHFT_EXT_SHARED_MEMORY_PLANS";

// Empty: unset, as shells have it.
std::string valueOf(const char* name) {
  const char* value = std::getenv(name);  // nothing here calls setenv
  return value == nullptr ? std::string() : value;
}

std::variant<SharedPlanTable, std::string> readPlans(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || !text) return "expected a file that can be read, found '" + path + "'";
  auto table = SharedPlanTable::parse(text.str());
  if (const auto* problem = std::get_if<std::string>(&table)) return path + ": " + *problem;
  return table;
}

}  // namespace

std::string useSharedEnvironment(HostEngineOptions* options) {
  const std::string wanted = valueOf(kSwitch);
  if (!wanted.empty() && wanted != "0" && wanted != "1")
    return std::string(kSwitch) + ": expected '0' or '1', found '" + wanted + "'";
  if (!wanted.empty()) options->shared_memory = wanted == "1";
  const std::string path = valueOf(kPlans);
  if (path.empty()) return {};
  auto plans = readPlans(path);
  if (const auto* problem = std::get_if<std::string>(&plans))
    return std::string(kPlans) + ": " + *problem;
  options->plans = std::get<SharedPlanTable>(std::move(plans));
  return {};
}

}  // namespace torchft_ext
