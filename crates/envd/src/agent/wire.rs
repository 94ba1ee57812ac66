//! Reading the JSON form of protocol buffers: null is unset, integers may be strings, bytes are base64.

use base64::alphabet::STANDARD as ALPHABET;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::Engine;
use serde::de::{Deserialize, Deserializer, Error};

const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &ALPHABET,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// A field of any type whose null means its default.
pub fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Number {
    Integer(u64),
    Text(String),
}

/// An unsigned integer, given as a number or as a decimal string.
pub fn unsigned<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let number = match Option::<Number>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Number::Integer(n)) => n,
        Some(Number::Text(text)) => text
            .parse()
            .map_err(|_| D::Error::custom("not an unsigned integer"))?,
    };
    u32::try_from(number)
        .map(Some)
        .map_err(|_| D::Error::custom("integer does not fit 32 bits"))
}

/// Decodes base64 in the standard or the URL alphabet, padded or not.
pub fn decode(text: &str) -> Result<Vec<u8>, base64::DecodeError> {
    if text.contains(['-', '_']) {
        return LENIENT.decode(text.replace('-', "+").replace('_', "/"));
    }
    LENIENT.decode(text)
}

/// A field of bytes.
pub fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
    match Option::<String>::deserialize(deserializer)? {
        None => Ok(None),
        Some(text) => decode(&text)
            .map(Some)
            .map_err(|e| D::Error::custom(format!("not base64: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use proptest::prelude::*;

    #[derive(serde::Deserialize)]
    struct Message {
        #[serde(default, deserialize_with = "unsigned")]
        n: Option<u32>,
        #[serde(default, deserialize_with = "nullable")]
        list: Vec<String>,
    }

    #[test]
    fn integers_come_as_numbers_strings_or_null() {
        let n = |json: &str| serde_json::from_str::<Message>(json).map(|m| m.n);
        assert_eq!(n("{}").unwrap(), None);
        assert_eq!(n(r#"{"n":null,"list":null}"#).unwrap(), None);
        assert_eq!(n(r#"{"n":7}"#).unwrap(), Some(7));
        assert_eq!(n(r#"{"n":"7"}"#).unwrap(), Some(7));
        for bad in [
            r#"{"n":-1}"#,
            r#"{"n":4294967296}"#,
            r#"{"n":"x"}"#,
            r#"{"n":1.5}"#,
            r#"{"n":[]}"#,
        ] {
            assert!(n(bad).is_err(), "{bad}");
        }
        assert!(serde_json::from_str::<Message>(r#"{"list":null}"#)
            .unwrap()
            .list
            .is_empty());
    }

    proptest! {
        #[test]
        fn both_alphabets_decode(data in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert_eq!(decode(&STANDARD.encode(&data)).unwrap(), data.clone());
            prop_assert_eq!(decode(&URL_SAFE_NO_PAD.encode(&data)).unwrap(), data);
        }
    }
}
