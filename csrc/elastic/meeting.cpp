#include "elastic/meeting.h"

#include <algorithm>

#include "net/frame.h"

namespace torchft_ext {

Nonce meetingNonce(const std::string& job) {
  const Digest256 digest = sha256("torchft_ext meeting " + job);
  Nonce nonce;
  std::copy_n(digest.begin(), nonce.bytes.size(), nonce.bytes.begin());
  return nonce;
}

Digest256 meetingProof(const MeetingKey& key, MeetingSide side, const Challenge& challenge,
                       const Challenge& own) {
  ByteWriter writer;
  writer.u8(side == MeetingSide::kClient ? 1 : 2);
  writer.raw(challenge.bytes);
  writer.raw(own.bytes);
  writer.text(key.job);
  return hmacSha256(key.key, writer.take());
}

bool equalInConstantTime(const Digest256& a, const Digest256& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace torchft_ext
