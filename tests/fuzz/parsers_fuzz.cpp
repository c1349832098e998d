// Everything that parses bytes from the network or the store, under libFuzzer. The first byte picks the parser. What a
// parser accepts must come out the same when it is encoded and parsed again.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "net/failure_frame.h"
#include "net/frame.h"
#include "net/handshake.h"
#include "net/socket_address.h"
#include "peers/notice.h"
#include "rendezvous/rendezvous.h"

namespace {

using namespace torchft_ext;  // NOLINT(google-build-using-namespace): a program of its own

void require(bool condition) {
  if (!condition) std::abort();
}

void header(std::string_view bytes) {
  if (bytes.size() < kFrameHeaderBytes) return;
  FrameBytes raw;
  std::memcpy(raw.data(), bytes.data(), raw.size());
  std::string why;
  const auto parsed = decodeHeader(raw, &why);
  require(parsed.has_value() || !why.empty());
  if (parsed) require(encodeHeader(*parsed) == raw);
}

void failure(std::string_view bytes) {
  const auto parsed = decodeFailure(bytes, 8);
  if (parsed) require(encodeFailure(*parsed) == bytes);
}

void notice(std::string_view bytes) {
  if (const auto parsed = decodeNotice(bytes)) require(encodeNotice(*parsed) == bytes);
}

void handshake(std::string_view bytes) {
  if (const auto hello = decodeHello(bytes)) require(encodeHello(*hello).size() == kFrameHeaderBytes + bytes.size());
  if (const auto welcome = decodeWelcome(bytes)) {
    require(encodeWelcome(*welcome).size() == kFrameHeaderBytes + bytes.size());
  }
  decodeRefusal(bytes);
}

void records(std::string_view bytes) {
  if (const auto record = decodeRecord(bytes)) require(decodeRecord(encodeRecord(*record)).has_value());
  if (const auto go = decodeGo(bytes)) require(decodeGo(encodeGo(go->token, go->roster)).has_value());
}

void addresses(std::string_view bytes) {
  if (const auto address = SocketAddress::parse(bytes)) require(SocketAddress::parse(address->toString()) == address);
  PortRange::parse(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 6) {
    case 0: header(bytes); break;
    case 1: failure(bytes); break;
    case 2: handshake(bytes); break;
    case 3: records(bytes); break;
    case 4: notice(bytes); break;
    default: addresses(bytes); break;
  }
  return 0;
}
