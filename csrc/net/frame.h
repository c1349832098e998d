// The wire format: little-endian, a fixed header of 40 bytes, then `length` bytes of payload.
//
//   0 magic u32 | 4 version u16 | 6 type u16 | 8 length u64 | 16 seq u64 | 24 tag u64 | 32 aux u64
//
// The meaning of seq, tag and aux depends on the type. Parsing is total: any bytes give a header or
// a reason why not, nothing is allocated from a length that was not bounded first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace torchft_ext {

inline constexpr uint32_t kFrameMagic = 0x54465831;  // "1XFT"
inline constexpr uint16_t kWireVersion = 5;
inline constexpr size_t kFrameHeaderBytes = 40;

enum class FrameType : uint16_t {
  kHello = 1,      // connector -> acceptor, first frame of a connection
  kWelcome = 2,    // acceptor -> connector, its answer
  kRefused = 3,    // acceptor -> connector: not admitted; payload: a reason (text, bounded)
  kData = 10,      // part of a collective: seq = operation, tag = its signature, aux = step
  kAnnounce = 11,  // a send is waiting: seq = its number, tag = user's tag, or the name of the
                   // collective whose step it is, aux = bytes, payload: the signature u64
  kClear = 12,     // the matching recv is posted: seq = the announced number
  kMessage = 13,   // a piece of the send's bytes: seq = the announced number, aux = offset
  kBarrier = 14,   // forming a generation: this end's connections are up; aux: 1 if it shares
                   // memory with all others
  kNudge = 15,     // on a collective channel: there is something for it in shared memory
  kQuestion = 16,  // on a control channel: what has been issued? seq: of which collective; answered
                   // by a kReport
  kReport = 17,    // payload: encoded IssueReport
  kFailed = 20,    // the generation failed: payload: encoded Failure, aux: below; seq: with
                   // kFinalFrameOfLeaver the exchanges that the sender has done
  kGoodbye = 21,   // this process leaves; all it had to send has been sent; aux: below; seq: the
                   // exchanges that it has done
  kBeat = 30,      // liveness connection: alive
  kNotice = 31,    // liveness connection: news of a generation: payload: encoded Notice
  kMember = 40,    // members of an elastic job: who the sender is: payload: encoded Member
  kElastic = 41,   // payload: encoded ElasticMessage
  kCall = 42,      // of a view's store: seq = its number, payload: encoded StoreCall
  kAnswer = 43,    // to the call with that seq: payload: encoded StoreAnswer
  kInquiry = 44,   // how is the job? of a process that takes no part in it
  kJobReport = 45,  // the answer: payload: encoded JobReport
};

// Bits of aux in kFailed and kGoodbye.
inline constexpr uint64_t kFinalFrameWasUp = 1;          // the sender had passed the barrier
inline constexpr uint64_t kFinalFrameBeginsAnother = 2;  // it leaves to begin another generation
inline constexpr uint64_t kFinalFrameOfLeaver = 4;       // it failed for want of one that has left
inline constexpr uint64_t kFinalFrameShared = 8;         // its collectives ran in shared memory

struct FrameHeader {
  FrameType type = FrameType::kHello;
  uint64_t length = 0;
  uint64_t seq = 0;
  uint64_t tag = 0;
  uint64_t aux = 0;
};

using FrameBytes = std::array<uint8_t, kFrameHeaderBytes>;
FrameBytes encodeHeader(const FrameHeader& header);
// Refuses a wrong magic or version and an unknown type; *why says which, with what was found.
std::optional<FrameHeader> decodeHeader(const FrameBytes& bytes, std::string* why);
// The version a frame was made with, whichever it is; nullopt: this is no frame of ours at all.
std::optional<uint16_t> versionOf(const FrameBytes& bytes);
// The longest payload a type may have; kData and kMessage: no bound here, the receiver compares the
// length with what it expects before it reads a byte.
uint64_t longestPayload(FrameType type);

// Payload fields: integers little-endian, strings and byte runs with a u32 length in front.
class ByteWriter {
 public:
  void u8(uint8_t value);
  void u16(uint16_t value);
  void u32(uint32_t value);
  void u64(uint64_t value);
  void i64(int64_t value) { u64(static_cast<uint64_t>(value)); }
  void text(std::string_view value);
  void raw(std::span<const uint8_t> bytes);  // no length in front
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads what ByteWriter wrote. After the first read past the end everything returns zero or empty
// and ok() is false: check once, at the end.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}
  uint8_t u8();
  uint16_t u16();
  uint32_t u32();
  uint64_t u64();
  int64_t i64() { return static_cast<int64_t>(u64()); }
  std::string text(size_t longest);
  void raw(std::span<uint8_t> into);
  bool ok() const { return ok_; }
  void fail() { ok_ = false; }  // what was read makes no sense
  bool atEnd() const { return ok_ && rest_.empty(); }

 private:
  std::string_view takeBytes(size_t count);
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace torchft_ext
