#include "device_child/device_served.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <exception>
#include <iterator>
#include <utility>
#include <vector>

#include "device/on_device.h"
#include "device/stream_side.h"
#include "engines/known_engines.h"
#include "host/process.h"

namespace torchft_ext::device_child {
namespace {

using Made = std::variant<std::shared_ptr<Engine>, std::string>;

Made engineOf(EngineKind::Outcome outcome) {
  if (const auto* not_here = std::get_if<NotHere>(&outcome)) return not_here->why;
  if (const auto* failure = std::get_if<Failure>(&outcome)) return failure->describe();
  return std::get<MadeEngine>(std::move(outcome)).engine;
}

}  // namespace

Made DeviceServed::make(const MakeHost& host) {
  const auto kind = engineRegistry().find(engine_);
  if (!kind || kind->ipc == nullptr) return "no engine '" + engine_ + "' that takes lent memory";
  auto lent = kind->ipc();
  if (const auto* not_here = std::get_if<NotHere>(&lent)) return not_here->why;
  ipc_ = std::get<std::shared_ptr<DeviceIpc>>(std::move(lent));
  if (kind->stop != nullptr) addExitStep(kind->stop);
  try {
    return engineOf(kind->make({host, std::nullopt, false}));
  } catch (const c10::Error& error) {  // settings that are wrong
    return std::string(error.what_without_backtrace());
  }
}

std::optional<DeviceServed::Found> DeviceServed::found(const child::Span& span) const {
  if (span.bytes == 0) return Found{};
  const auto after = lent_.upper_bound(span.offset);
  if (after == lent_.begin()) return std::nullopt;
  const auto& [address, lent] = *std::prev(after);
  const uint64_t offset = span.offset - address;
  if (offset > lent.bytes || span.bytes > lent.bytes - offset) return std::nullopt;
  return Found{{static_cast<uint8_t*>(lent.here.get()) + offset, span.bytes}, lent.here};
}

std::optional<Buffer> DeviceServed::at(const child::Span& span) const {
  const auto memory = found(span);
  return memory ? std::optional(memory->buffer) : std::nullopt;
}

DeviceIpc& DeviceServed::ipc() const {
  if (!ipc_) throw child::ProtocolError("memory before configure");
  return *ipc_;
}

void DeviceServed::heard(child::Kind kind, const std::string& payload) {
  switch (kind) {
    case child::Kind::kMemory:
      return lend(child::parseMemory(payload));
    case child::Kind::kForget:
      lent_.erase(child::parseForget(payload));
      return;
    case child::Kind::kOrder:
      return wait(child::parseOrder(payload));
    default:
      throw child::ProtocolError("a frame of kind " + std::to_string(static_cast<int>(kind)));
  }
}

void DeviceServed::lend(const child::LentMemory& memory) {
  const auto device = static_cast<c10::DeviceIndex>(memory.device);
  auto here = ipc().openMemory({memory.address, memory.bytes, memory.handle}, device);
  lent_.insert_or_assign(memory.address, Lent{memory.bytes, std::move(here)});
}

void DeviceServed::wait(const child::StreamOrder& order) {
  const c10::Device device(ipc().type(), static_cast<c10::DeviceIndex>(order.device));
  auto found = turns_.find(order.event);
  if (found == turns_.end()) {
    const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
    Turn turn{ipc().openEvent(order.handle, device.index()),
              guard->getStreamFromGlobalPool(device)};
    found = turns_.emplace(order.event, std::move(turn)).first;
  }
  const OnDevice on_device(device);
  found->second.event->block(found->second.stream);
  current_ = found->second.stream;
}

void DeviceServed::place(Operation& operation, const child::Issue& issue) {
  if (!current_) throw child::ProtocolError("an operation without an order");
  auto side = std::make_shared<StreamSide>(*current_);
  side->flat = issue.flat;
  operation.device = std::move(side);
  auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>();
  for (const auto* spans : {&issue.outputs, &issue.inputs})
    for (const child::Span& span : *spans) owners->push_back(found(span).value().owner);
  operation.keep_alive = std::move(owners);
}

}  // namespace torchft_ext::device_child
