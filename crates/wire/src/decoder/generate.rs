//! Random values of any type that can be decoded: a `serde` deserializer that reads from a stream of
//! random numbers, so that every variant of every message is made without a line about it.

use serde::Deserializer;
use serde::de::value::U32Deserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, EnumAccess, Error as _, IntoDeserializer, MapAccess,
    SeqAccess, VariantAccess, Visitor,
};

type Error = serde::de::value::Error;

/// Items of a list at most; fewer the deeper it is nested.
const ITEMS_MAX: u64 = 5;
/// Types that refuse some values (names, say) are asked again this often.
const TRIES: u64 = 1000;

/// A seeded stream of random numbers (`SplitMix64`).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Evenly from `0..bound`; 0 for an empty range.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// Fewer than `limit` random bytes.
    pub fn bytes(&mut self, limit: u64) -> Vec<u8> {
        (0..self.below(limit)).map(|_| self.draw() as u8).collect()
    }

    /// Small numbers, extreme ones and their neighbours, far more often than others.
    pub fn number(&mut self) -> u64 {
        match self.below(8) {
            0..=3 => self.below(10),
            4 => (1 << self.below(64)) - self.below(2),
            5 => u64::MAX - self.below(3),
            _ => self.draw() >> self.below(64),
        }
    }
}

/// A random value; the same for the same seed.
///
/// # Panics
///
/// When the type refuses a thousand random values: it needs a generator of its own.
#[must_use]
#[allow(clippy::panic)]
pub fn generate<T: DeserializeOwned>(seed: u64) -> T {
    let mut refusal = None;
    for attempt in 0..TRIES {
        let random = Random::new(seed.wrapping_mul(TRIES).wrapping_add(attempt));
        match T::deserialize(&mut Source { random, depth: 0 }) {
            Ok(value) => return value,
            Err(error) => refusal = Some(error),
        }
    }
    panic!("no {} can be made: {refusal:?}", std::any::type_name::<T>())
}

/// Where the values come from.
struct Source {
    random: Random,
    depth: u64,
}

impl Source {
    fn count(&mut self) -> u64 {
        self.random.below(ITEMS_MAX.saturating_sub(self.depth) + 1)
    }

    fn text(&mut self) -> String {
        const LETTERS: &[u8; 16] = b"abcdefgh-1234567";
        let letter = |random: &mut Random| LETTERS[random.below(16) as usize] as char;
        (0..=self.random.below(12)).map(|_| letter(&mut self.random)).collect()
    }

    /// Bytes of names are text, most of the time.
    fn byte(&mut self) -> u8 {
        match self.random.below(10) {
            0 => self.random.draw() as u8,
            _ => b'a' + self.random.below(26) as u8,
        }
    }

    fn visit_items<'de, V: Visitor<'de>>(
        &mut self,
        left: u64,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.depth += 1;
        let value = visitor.visit_seq(Items { source: self, left });
        self.depth -= 1;
        value
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty),*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.$visit(self.random.number() as $type)
        })*
    };
}

impl<'de> Deserializer<'de> for &mut Source {
    type Error = Error;

    numbers!(
        deserialize_i8 visit_i8 i8, deserialize_i16 visit_i16 i16, deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64, deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32, deserialize_u64 visit_u64 u64,
        deserialize_f32 visit_f32 f32, deserialize_f64 visit_f64 f64
    );

    fn is_human_readable(&self) -> bool {
        false
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("the type must say what it is"))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.random.below(2) == 1)
    }

    fn deserialize_u8<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_u8(self.byte())
    }

    fn deserialize_i128<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i128(i128::from(self.random.number()) << self.random.below(64))
    }

    fn deserialize_u128<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_u128(u128::from(self.random.number()) << self.random.below(64))
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_char(char::from(self.byte()))
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.text())
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.text())
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_byte_buf(self.random.bytes(32))
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_byte_buf(self.random.bytes(32))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.random.below(2) {
            0 => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let count = self.count();
        self.visit_items(count, visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.visit_items(length as u64, visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.visit_items(length as u64, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let left = self.count();
        self.depth += 1;
        let value = visitor.visit_map(Items { source: self, left });
        self.depth -= 1;
        value
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.visit_items(fields.len() as u64, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let variant = self.random.below(variants.len() as u64) as u32;
        visitor.visit_enum(Variant { source: self, variant })
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("names of fields are not part of the encoding"))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }
}

/// The rest of a list, a struct or a map.
struct Items<'a> {
    source: &'a mut Source,
    left: u64,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(&mut *self.source).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left as usize)
    }
}

impl<'de> MapAccess<'de> for Items<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        self.next_element_seed(seed)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        seed.deserialize(&mut *self.source)
    }
}

/// The chosen variant of an enum.
struct Variant<'a> {
    source: &'a mut Source,
    variant: u32,
}

impl<'a, 'de> EnumAccess<'de> for Variant<'a> {
    type Error = Error;
    type Variant = &'a mut Source;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, &'a mut Source), Error> {
        let index: U32Deserializer<Error> = self.variant.into_deserializer();
        Ok((seed.deserialize(index)?, self.source))
    }
}

impl<'de> VariantAccess<'de> for &mut Source {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_tuple(length, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(fields.len(), visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_value_and_every_variant_is_made() {
        type Request = crate::meta::MetaRequest;
        let bytes = |seed| crate::encode(&generate::<Request>(seed));
        assert_eq!(bytes(7), bytes(7));
        let first: std::collections::BTreeSet<u8> = (0..2000).map(|seed| bytes(seed)[0]).collect();
        let last = first.last().copied().unwrap_or_default();
        assert_eq!(first.len(), usize::from(last) + 1, "{first:?}");
        assert!(crate::decode::<Request>(&[last + 1]).is_err(), "a later variant is never made");
    }
}
