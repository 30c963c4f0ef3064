//! Keys: the cluster's secret, and what is derived from it.
//!
//! There is one secret. Everything else is HMAC-SHA256 of it under a label, so every server can
//! check a volume's access key without asking the manager, and a key opens its volume only.

use std::fmt;
use std::path::Path;

use hmac::{Hmac, Mac as _};
use milpa_types::VolumeId;
use milpa_wire::handshake::Mac;
use sha2::Sha256;

use crate::disk::{self, File, Open};
use crate::entropy;

/// 32 bytes that prove membership: the cluster's secret, or a volume's access key.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

/// Why a key could not be read or made.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Not 64 hexadecimal digits.
    #[error("a key is 64 hexadecimal digits, this has {0} characters or other ones among them")]
    Malformed(usize),
    /// The key file.
    #[error("key file {path}")]
    File {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The kernel gave no randomness.
    #[error("no randomness from the kernel: {0}")]
    Entropy(String),
}

impl Key {
    /// Fresh randomness from the kernel.
    ///
    /// # Errors
    ///
    /// [`KeyError::Entropy`] when there is none.
    pub fn random() -> Result<Key, KeyError> {
        let mut bytes = [0; 32];
        entropy::fill(&mut bytes).map_err(|e| KeyError::Entropy(e.to_string()))?;
        Ok(Key(bytes))
    }

    /// Reads 64 hexadecimal digits; white space around them is allowed.
    ///
    /// # Errors
    ///
    /// [`KeyError::Malformed`] for anything else.
    pub fn from_hex(text: &str) -> Result<Key, KeyError> {
        let digits = text.trim().as_bytes();
        let malformed = || KeyError::Malformed(digits.len());
        let (pairs, []) = digits.as_chunks::<2>() else { return Err(malformed()) };
        let decode = |pair: &[u8; 2]| {
            let digit = |d: u8| char::from(d).to_digit(16);
            Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8)
        };
        let bytes: Option<Vec<u8>> = pairs.iter().map(decode).collect();
        let bytes = bytes.and_then(|b| b.try_into().ok()).ok_or_else(malformed)?;
        Ok(Key(bytes))
    }

    /// 64 hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads a key file.
    ///
    /// # Errors
    ///
    /// [`KeyError`] when it cannot be read or holds no key.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let bytes = disk::read(path)
            .map_err(|source| KeyError::File { path: path.display().to_string(), source })?;
        Key::from_hex(&String::from_utf8_lossy(&bytes))
    }

    /// Writes a new key file that only its owner can read. An existing one is never replaced.
    ///
    /// # Errors
    ///
    /// [`KeyError::File`], also when the file exists.
    pub fn write_new(&self, path: &Path) -> Result<(), KeyError> {
        let write = || {
            let file = File::open(path, Open::Private)?;
            file.write_at(format!("{}\n", self.to_hex()).as_bytes(), 0)?;
            file.sync()
        };
        write().map_err(|source| KeyError::File { path: path.display().to_string(), source })
    }

    /// The access key of a volume, derived from the cluster's secret.
    #[must_use]
    pub fn volume_key(&self, volume: VolumeId) -> Key {
        Key(self.mac(&[b"milpa volume access key 1", &volume.0.to_le_bytes()]))
    }

    /// The bearer token of the HTTP admin interface, derived from the cluster's secret.
    #[must_use]
    pub fn admin_token(&self) -> String {
        Key(self.mac(&[b"milpa http admin token 1"])).to_hex()
    }

    /// HMAC-SHA256 over the parts, each preceded by its length so that no two lists collide.
    #[must_use]
    pub fn mac(&self, parts: &[&[u8]]) -> Mac {
        self.begin(parts).finalize().into_bytes().into()
    }

    /// Checks a [`mac`](Key::mac) in constant time.
    #[must_use]
    pub fn verify(&self, parts: &[&[u8]], mac: &Mac) -> bool {
        self.begin(parts).verify_slice(mac).is_ok()
    }

    fn begin(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC takes keys of any length, so this never fails; a zero key would only refuse peers.
        let mut hmac = Hmac::<Sha256>::new_from_slice(&self.0)
            .unwrap_or_else(|_| Hmac::<Sha256>::new(&Default::default()));
        for part in parts {
            hmac.update(&(part.len() as u64).to_le_bytes());
            hmac.update(part);
        }
        hmac
    }
}

/// Never the digits: keys end up in logs otherwise.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_hex_and_refuse_anything_else() {
        let key = Key::random().unwrap();
        assert_eq!(Key::from_hex(&format!(" {}\n", key.to_hex())).unwrap(), key);
        for bad in ["", "ab", &"g".repeat(64), &"a".repeat(63), &"é".repeat(32)] {
            assert!(Key::from_hex(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn each_volume_has_its_own_key() {
        let secret = Key::random().unwrap();
        assert_ne!(secret.volume_key(VolumeId(1)), secret.volume_key(VolumeId(2)));
        assert_eq!(secret.volume_key(VolumeId(1)), secret.volume_key(VolumeId(1)));
    }

    #[test]
    fn a_mac_tells_how_its_parts_were_cut() {
        let key = Key::random().unwrap();
        assert_ne!(key.mac(&[b"ab", b"c"]), key.mac(&[b"a", b"bc"]));
        assert!(key.verify(&[b"ab"], &key.mac(&[b"ab"])));
        assert!(!key.verify(&[b"ac"], &key.mac(&[b"ab"])));
    }
}
