#include "child/host_served.h"

#include <utility>

namespace torchft_ext::child {

HostServed::HostServed(UniqueFd arena) : arena_(arena.get()) {}

std::variant<std::shared_ptr<Engine>, std::string> HostServed::make(const MakeHost& host) {
  auto made = host();
  if (const auto* failure = std::get_if<Failure>(&made)) return failure->describe();
  return std::get<std::shared_ptr<Engine>>(std::move(made));
}

void HostServed::heard(Kind kind, const std::string& /*payload*/) {
  throw ProtocolError("a frame of kind " + std::to_string(static_cast<int>(kind)));
}

}  // namespace torchft_ext::child
